"""Random numbers and augmentations: they belong to the sample, and change an image as they say."""

import math

import pytest
import torch

from recipes.vision.augment import Augment, normalise
from recipes.vision.pixels.geometry import crop, resized_crop
from recipes.vision.pixels.mixing import mix as mix_images
from trainer import Refusal
from trainer.data.rng import Random, mix_seeds

INDICES = torch.randperm(60_000, generator=torch.Generator().manual_seed(1))[:128]
# the parts in which the same 128 samples may come: at once, in slices, in another order
SHUFFLED = torch.randperm(128, generator=torch.Generator().manual_seed(2))
CUTS = {
    "slices": list(torch.arange(128).split(32)),
    "uneven": list(torch.arange(128).split([1, 2, 125])),
    "shuffled": [SHUFFLED],
    "shuffled slices": list(SHUFFLED.split(7)),
}


def images(batch, channels, side, dtype=torch.uint8):
    pixels = torch.randint(0, 256, (batch, channels, side, side), generator=torch.Generator().manual_seed(3))
    return pixels.to(dtype)


def rng(indices=INDICES, seed=5, epoch=3):
    return Random(seed, epoch, indices)


def belongs_to_the_sample(compute):
    """compute(positions): the result for the samples at these positions of the 128, the same in any cut."""
    whole = compute(torch.arange(128))
    return all(torch.equal(compute(at), whole[at]) for parts in CUTS.values() for at in parts)


def test_random_numbers_belong_to_the_sample():
    def draw(positions):
        random = rng(INDICES[positions])
        batch = len(positions)
        drawn = random.uniform(batch, 3), random.normal(batch, 2, 2).flatten(1), random.integers(-5, 9, batch)[:, None]
        return torch.cat([part.double() for part in drawn], dim=1)

    assert belongs_to_the_sample(draw)


@pytest.mark.parametrize(
    ("channels", "side", "dtype"),
    [(1, 8, torch.uint8), (1, 28, torch.float32), (3, 32, torch.uint8), (3, 7, torch.float32)],
)
def test_augmented_images_belong_to_the_sample(channels, side, dtype):
    batch = images(128, channels, side, dtype)
    augment = Augment(crop=2, flip=True, rotate=15, scale=0.2, shear=0.1, shift=1.5, mean=(0.3,), std=(0.7,))
    assert belongs_to_the_sample(lambda at: augment(batch[at], rng(INDICES[at]), training=True))


@pytest.mark.parametrize(("channels", "side"), [(1, 8), (3, 32)])
def test_boxes_colours_and_mixtures_belong_to_the_sample(channels, side):
    batch, labels = images(128, channels, side), torch.arange(128) % 7
    augment = Augment(2, True, 0.2, 0.4, 0.4, 0.4, trivial=True, erase=0.5, mixup=0.3, cutmix=1.0)

    def mixed(at):
        seen = augment(batch[at], rng(INDICES[at]), training=True)
        others = augment(batch[(at + 1) % 128], rng(INDICES[(at + 1) % 128]), training=True)
        pictures, targets = augment.mix(seen, labels[at], others, labels[(at + 1) % 128], rng(INDICES[at], seed=9), 7)
        return torch.cat((pictures.flatten(1), targets), dim=1)

    assert belongs_to_the_sample(mixed)


def test_random_numbers_differ_over_seeds_epochs_samples_and_calls():
    random = rng()
    rows = [random.uniform(128), random.uniform(128), rng(seed=6).uniform(128), rng(epoch=4).uniform(128)]
    everything = torch.stack(rows)
    assert everything.unique().numel() == everything.numel()


def test_the_numbers_are_these():
    """Other numbers would change every run with augmentation: a change here is a change of every learning curve."""
    random = Random(0, 1, torch.tensor([0, 1, 59_999]))
    assert random.integers(0, 1_000_000, 3).tolist() == [970342, 550761, 182425]
    assert mix_seeds(0, 1, 59_999) == 9033623877621445208


def test_a_seed_depends_on_every_number_and_on_their_order():
    seeds = [mix_seeds(seed, epoch, index) for seed in range(10) for epoch in range(10) for index in range(20)]
    assert len(set(seeds)) == 2_000
    for seed in (-1, 2**31, 2**63 - 1, 2**70):
        assert Random(seed, 0, torch.tensor([0])).uniform(1).item() < 1


def test_numbers_are_uniform_or_normal_and_independent():
    random = Random(0, 0, torch.arange(2000))
    uniform, normal = random.uniform(2000, 500).double(), random.normal(2000, 500).double()
    assert 0 <= uniform.min() < uniform.max() < 1
    # both as their distribution says: Kolmogorov-Smirnov, 0.1 %
    for numbers in (uniform, torch.special.ndtr(normal)):
        ordered = numbers.flatten().sort().values
        expected = (torch.arange(len(ordered)) + 0.5) / len(ordered)
        assert (expected - ordered).abs().max() < 1.9 / math.sqrt(len(ordered))
        for one, other in ((numbers[:-1], numbers[1:]), (numbers[:, :-1], numbers[:, 1:])):  # next sample, next number
            assert torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1].abs() < 0.01


def test_integers_reach_both_ends_and_the_batch_comes_first():
    numbers = rng().integers(-2, 3, 128, 4, 5)
    assert numbers.shape == (128, 4, 5)
    assert numbers.unique().tolist() == [-2, -1, 0, 1, 2]
    with pytest.raises(ValueError, match="must begin with the batch of 128"):
        rng().uniform(4, 128)
    with pytest.raises(ValueError, match="do not exist"):
        rng().integers(3, 3, 128)


@pytest.mark.parametrize("flip", [False, True])
def test_a_crop_is_a_window_of_the_image_with_a_border(flip):
    batch = images(128, 3, 5)
    cropped = crop(batch, rng(), padding=2, flip=flip)
    bordered = torch.nn.functional.pad(batch, (2, 2, 2, 2))
    found: set[tuple[bool, int, int]] = set()
    for image, result in zip(bordered, cropped, strict=True):
        for mirrored in (False, True):
            source = image.flip(-1) if mirrored else image
            places = [
                (y, x) for y in range(5) for x in range(5) if torch.equal(source[:, y : y + 5, x : x + 5], result)
            ]
            found.update((mirrored, *place) for place in places)
            if places:
                break
        else:
            pytest.fail("a crop that is no window of its image")
    assert len({place[1:] for place in found}) == 25  # every place occurs
    assert {place[0] for place in found} == ({False, True} if flip else {False})


def test_normalise_is_torchvisions_to_the_last_bit():
    batch = images(4, 3, 6)
    mean, std = (0.5, 0.25, 0.1), (0.2, 0.3, 0.4)
    columns = (torch.tensor(values)[:, None, None] for values in (mean, std))
    theirs = batch.float().div(255).sub(next(columns)).div(next(columns))  # ToTensor, Normalize
    assert torch.equal(normalise(batch, mean, std), theirs)
    assert torch.equal(normalise(batch, (0.5,), (0.5,)), normalise(batch, (0.5,) * 3, (0.5,) * 3))


def test_evaluation_is_only_normalised():
    batch = images(8, 3, 12, torch.float32)
    before = batch.clone()
    augment = Augment(crop=2, flip=True, rotate=20, mean=(0.4,), std=(0.3,))
    assert torch.equal(augment(batch, rng(INDICES[:8]), training=False), normalise(batch, (0.4,), (0.3,)))
    assert not torch.equal(augment(batch, rng(INDICES[:8]), training=True), normalise(batch, (0.4,), (0.3,)))
    assert torch.equal(batch, before)
    assert augment(batch[:0], rng(INDICES[:0]), training=True).shape == (0, 3, 12, 12)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"crop": -1}, "augment.crop is -1"),
        ({"scale": 1.0}, "augment.scale is 1.0"),
        ({"mean": (0.1, 0.2)}, "2 values and augment.std 1"),
        ({"std": (0.0,)}, "above 0"),
        ({"erase": 1.5}, "augment.erase is 1.5; it is a fraction"),
    ],
)
def test_amounts_that_cannot_be_are_refused(arguments, words):
    with pytest.raises(Refusal, match=words):
        Augment(**arguments)


def test_a_resized_crop_is_a_box_of_the_image():
    """Of an image whose pixels say where they are, the result says which box it shows."""
    side, batch = 32, 128
    place = torch.arange(side) + 0.5
    maps = torch.stack((place.expand(side, side), place[:, None].expand(side, side))).expand(batch, 2, side, side)
    shown = resized_crop(maps, rng(), least=0.25)
    wide = (shown[:, 0, 0, -2] - shown[:, 0, 0, 1]) / (side - 3)  # pixels of the image for one of the result
    high = (shown[:, 1, -2, 0] - shown[:, 1, 1, 0]) / (side - 3)
    assert (wide * high).min() > 0.24
    assert (wide * high).max() < 1.01
    assert (wide * high).max() - (wide * high).min() > 0.6
    assert 0.74 < (wide / high).min() < 0.85
    assert 1.2 < (wide / high).max() < 1.34
    assert shown.min() >= 0.5
    assert shown.max() <= side - 0.5


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0.0), (0.0, 1.0), (0.4, 1.0)])
def test_targets_say_how_much_of_each_image_there_is(mixup, cutmix):
    own, other = torch.zeros(4000, 1, 12, 12), torch.ones(4000, 1, 12, 12)
    labels = torch.arange(4000) % 5
    random = Random(0, 0, torch.arange(4000))
    mixed, targets = mix_images(own, labels, other, (labels + 1) % 5, random, mixup, cutmix, classes=5)
    assert targets.shape == (4000, 5)
    assert torch.allclose(targets.sum(1), torch.ones(4000))
    share = mixed.mean((1, 2, 3))  # of the other image
    assert torch.allclose(targets.gather(1, ((labels + 1) % 5)[:, None])[:, 0], share, atol=1e-6)
    cut = ((mixed == 0) | (mixed == 1)).flatten(1).all(1)
    assert cut.float().mean() == pytest.approx(1.0 if not mixup else 0.5 if cutmix else 0.0, abs=0.1)
    if not cutmix:  # shares are drawn from beta(α, α)
        assert share.mean() == pytest.approx(0.5, abs=0.02)
        assert share.var() == pytest.approx(1 / (4 * (2 * mixup + 1)), rel=0.05)
