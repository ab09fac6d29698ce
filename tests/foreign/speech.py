"""Speech recognition in the manner of DeepSpeech: packed sequences, CTC with lengths, time before batch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import Dataset

from trainer import Data, Task


class Utterances(Dataset):
    """Features (T, 8): each of the 9 letters is a direction that lasts three to six frames."""

    def __init__(self, size, seed):
        self.size, self.seed = size, seed
        self.sounds = torch.randn(10, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(1000 * self.seed + i)
        letters = torch.randint(1, 10, (int(torch.randint(2, 6, (), generator=generator)),), generator=generator)
        lasts = torch.randint(3, 7, (len(letters),), generator=generator)
        frames = self.sounds[letters.repeat_interleave(lasts)]
        return frames + 0.3 * torch.randn(frames.shape, generator=generator), letters


class Speech(Data):
    def train(self):
        return Utterances(256, 1)

    def evaluation(self):
        return Utterances(30, 2)

    def collate(self, items):
        frames, letters = zip(*items, strict=True)
        lengths = torch.tensor([len(each) for each in frames])
        targets = {"letters": torch.cat(letters), "lengths": torch.tensor([len(each) for each in letters])}
        return {"frames": pad_sequence(frames), "lengths": lengths}, targets


class DeepSpeech(nn.Module):
    def __init__(self, hidden=24, labels=10):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(8, hidden, 3, padding=1), nn.Hardtanh(0, 20))
        self.rnn = nn.GRU(hidden, hidden, bidirectional=True)
        self.fc = nn.Linear(hidden, labels)

    def forward(self, x, lengths):
        x = self.conv(x.permute(1, 2, 0)).permute(2, 0, 1)
        x = pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)
        x, _ = pad_packed_sequence(self.rnn(x)[0])
        x = x.view(x.size(0), x.size(1), 2, -1).sum(2)
        return F.log_softmax(self.fc(x), dim=-1), lengths  # (T, B, labels)


class Transcribe(Task):
    best = "-cer"

    def forward(self, network, inputs, targets):
        return network(inputs["frames"], inputs["lengths"])

    def loss(self, output, target):
        log_probs, lengths = output
        loss = F.ctc_loss(log_probs, target["letters"], lengths, target["lengths"], reduction="sum", zero_infinity=True)
        return loss / max(len(target["lengths"]), 1)

    def weight(self, target):
        return len(target["lengths"])

    def metrics(self, output, target):
        log_probs, lengths = output
        errors, start = 0, 0
        for said, frames, letters in zip(log_probs.argmax(-1).T, lengths, target["lengths"], strict=True):
            heard = torch.unique_consecutive(said[:frames])
            heard, true = heard[heard > 0].tolist(), target["letters"][start : start + letters].tolist()
            errors, start = errors + distance(heard, true), start + letters
        return {"errors": log_probs.new_tensor(float(errors)), "letters": target["lengths"].sum()}

    def finish(self, totals):
        return {"cer": float(totals["errors"] / totals["letters"])}


def distance(heard, true):
    row = list(range(len(true) + 1))
    for i, h in enumerate(heard, 1):
        last, row[0] = row[0], i
        for j, t in enumerate(true, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (h != t))
    return row[-1]
