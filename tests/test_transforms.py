import math

import pytest
import torch

from trainer.data.seeds import mix
from trainer.data.transforms import Augment, Random, _quantiles, affine, crop, normalise
from trainer.refusal import Refusal

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


def assert_the_same_in_any_cut(compute, cut):
    """compute(positions): the result for the samples at these positions of the 128."""
    whole = compute(torch.arange(128))
    for positions in CUTS[cut]:
        assert torch.equal(compute(positions), whole[positions])


@pytest.mark.parametrize("cut", CUTS)
def test_random_numbers_belong_to_the_sample(cut):
    def draw(positions):
        random = rng(INDICES[positions])
        batch = len(positions)
        drawn = random.uniform(batch, 3), random.normal(batch, 2, 2).flatten(1), random.integers(-5, 9, batch)[:, None]
        return torch.cat([part.double() for part in drawn], dim=1)

    assert_the_same_in_any_cut(draw, cut)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("channels", "side"), [(1, 8), (1, 28), (3, 32), (3, 7)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_augmented_images_belong_to_the_sample(cut, threads, channels, side, dtype):
    batch = images(128, channels, side, dtype)
    augment = Augment(crop=2, flip=True, rotate=15, scale=0.2, shear=0.1, shift=1.5, mean=(0.3,), std=(0.7,))
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_the_same_in_any_cut(lambda at: augment(batch[at], rng(INDICES[at]), training=True), cut)
    finally:
        torch.set_num_threads(usual)


def test_random_numbers_differ_over_seeds_epochs_samples_and_calls():
    random = rng()
    rows = [random.uniform(128), random.uniform(128), rng(seed=6).uniform(128), rng(epoch=4).uniform(128)]
    everything = torch.stack(rows)
    assert everything.unique().numel() == everything.numel()


def test_successive_calls_continue_the_stream():
    apart, together = rng(), rng()
    assert torch.equal(torch.stack([apart.uniform(128) for _ in range(4)], dim=1), together.uniform(128, 4))


def test_the_numbers_are_these():
    """Other numbers would change every run with augmentation: a change here is a change of every learning curve."""
    random = Random(0, 1, torch.tensor([0, 1, 59_999]))
    assert random.integers(0, 1_000_000, 3).tolist() == [970342, 550761, 182425]
    assert mix(0, 1, 59_999) == 9033623877621445208


def test_a_seed_depends_on_every_number_and_on_their_order():
    seeds = [mix(seed, epoch, index) for seed in range(10) for epoch in range(10) for index in range(100)]
    assert len(set(seeds)) == 10_000


@pytest.mark.parametrize("seed", [-1, 0, 2**31, 2**63 - 1, 2**70])
def test_any_seed_will_do(seed):
    assert 0 <= mix(seed, 0, 0) < 2**63
    assert Random(seed, 0, torch.tensor([0])).uniform(1).item() < 1


def test_uniform_numbers_are_uniform():
    numbers = Random(0, 0, torch.arange(1000)).uniform(1000, 200).double()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.003
    assert abs(numbers.var() - 1 / 12) < 0.001
    for one, other in ((numbers[:-1], numbers[1:]), (numbers[:, :-1], numbers[:, 1:])):  # next sample, next number
        assert torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1].abs() < 0.01


def test_normal_numbers_are_normal():
    numbers = Random(0, 0, torch.arange(2000)).normal(2000, 500).double()
    ordered = numbers.flatten().sort().values
    expected = torch.special.ndtr(ordered)
    found = (torch.arange(len(ordered)) + 0.5) / len(ordered)
    assert (expected - found).abs().max() < 1.9 / math.sqrt(len(ordered))  # Kolmogorov-Smirnov, 0.1 %
    assert abs(numbers.mean()) < 0.005
    assert abs(numbers.var() - 1) < 0.005
    assert abs((numbers**4).mean() - 3) < 0.05


def test_normal_numbers_reach_into_the_tails():

    table = _quantiles(torch.device("cpu"))
    assert table[33 * 256] == 0  # probability 1
    assert table.isfinite().all()
    assert table[256] > 6
    assert (table[256 : 33 * 256].diff() < 0).all()


def test_integers_reach_both_ends_and_keep_their_shape():
    numbers = rng().integers(-2, 3, 128, 4, 5)
    assert numbers.shape == (128, 4, 5)
    assert numbers.unique().tolist() == [-2, -1, 0, 1, 2]


def test_the_first_dimension_is_the_batch():
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


def test_flip_alone_gives_the_image_or_its_mirror():
    batch = images(128, 3, 6)
    flipped = crop(batch, rng(), padding=0, flip=True)
    mirrored = (flipped == batch.flip(-1)).flatten(1).all(1)
    same = (flipped == batch).flatten(1).all(1)
    assert (mirrored ^ same).all()
    assert 40 < mirrored.sum() < 88


def test_affine_without_amounts_is_the_identity():
    batch = images(16, 2, 9, torch.float32)
    assert torch.allclose(affine(batch, rng(INDICES[:16])), batch, atol=1e-3)


def test_affine_moves_by_the_pixels_it_says():
    batch = images(64, 1, 9, torch.float32)
    moved = affine(batch, rng(INDICES[:64]), shift=2.0)
    draws = rng(INDICES[:64]).uniform(64, 5) * 2 - 1
    right, down = 2 * draws[:, 3], 2 * draws[:, 4]
    for image, result, x, y in zip(batch, moved, right, down, strict=True):
        column, row = int(x.floor()), int(y.floor())
        corners = torch.nn.functional.pad(image[0], (4, 4, 4, 4))
        part = corners[4 + row : 14 + row, 4 + column : 14 + column]
        fx, fy = x - column, y - row
        across = part[:, :-1] * (1 - fx) + part[:, 1:] * fx
        assert torch.allclose(across[:-1] * (1 - fy) + across[1:] * fy, result[0], atol=0.05)


def test_affine_turns_by_at_most_the_degrees_it_says():
    side, batch = 65, 32
    line = torch.zeros(batch, 1, side, side)
    line[:, :, side // 2] = 1.0  # a horizontal line through the middle
    turned = affine(line, rng(INDICES[:batch]), rotate=20.0)[:, 0]
    heights = (turned[:, :, 50] * torch.arange(side)).sum(1) / turned[:, :, 50].sum(1) - side // 2
    angles = torch.atan2(heights, torch.tensor(50.0 - side // 2)).rad2deg()
    draws = rng(INDICES[:batch]).uniform(batch, 5)[:, 0] * 2 - 1
    expected = 2 * torch.atan(draws * math.tan(math.radians(10))).rad2deg()
    assert torch.allclose(angles.abs(), expected.abs(), atol=1.0)
    assert angles.abs().max() > 15


def test_what_affine_brings_in_from_outside_is_black():
    white = torch.full((8, 1, 10, 10), 255.0)
    assert affine(white, rng(INDICES[:8]), rotate=30.0, shift=3.0).min() < 1


def test_normalise_is_torchvisions():
    batch = images(4, 3, 6)
    mean, std = (0.5, 0.25, 0.1), (0.2, 0.3, 0.4)
    expected = (batch.double() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    result = normalise(batch, mean, std)
    assert result.dtype == torch.float32
    assert torch.allclose(result.double(), expected, atol=1e-5)
    assert torch.equal(normalise(batch, (0.5,), (0.5,)), normalise(batch, (0.5,) * 3, (0.5,) * 3))


def test_evaluation_is_only_normalised():
    batch = images(8, 3, 12)
    augment = Augment(crop=2, flip=True, rotate=20, mean=(0.4,), std=(0.3,))
    assert torch.equal(augment(batch, rng(INDICES[:8]), training=False), normalise(batch, (0.4,), (0.3,)))
    assert not torch.equal(augment(batch, rng(INDICES[:8]), training=True), normalise(batch, (0.4,), (0.3,)))


def test_an_empty_batch_stays_empty():
    augment = Augment(crop=2, flip=True, rotate=20)
    assert augment(images(0, 3, 12), rng(INDICES[:0]), training=True).shape == (0, 3, 12, 12)


def test_images_are_left_as_they_were():
    batch = images(8, 3, 12, torch.float32)
    before = batch.clone()
    Augment(crop=2, flip=True)(batch, rng(INDICES[:8]), training=True)
    assert torch.equal(batch, before)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"crop": -1}, "augment.crop is -1"),
        ({"rotate": -5.0}, "augment.rotate is -5"),
        ({"scale": 1.0}, "augment.scale is 1.0"),
        ({"mean": (0.1, 0.2)}, "2 values and augment.std 1"),
        ({"std": (0.0,)}, "above 0"),
    ],
)
def test_amounts_that_cannot_be_are_refused(arguments, words):
    with pytest.raises(Refusal, match=words):
        Augment(**arguments)


def test_a_mean_for_other_channels_is_refused():
    with pytest.raises(Refusal, match="mean and std have 3 values, the images 1 channels"):
        normalise(images(2, 1, 4), (0.1, 0.2, 0.3), (0.1, 0.2, 0.3))
