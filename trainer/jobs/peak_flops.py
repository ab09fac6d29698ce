"""How much a device can compute at most, by its maker's data sheet: what a step's own work is measured against."""

from __future__ import annotations

# Dense matrix products, without sparsity, in 10¹² operations a second: in bf16 and fp16, TF32, fp32, fp64. Where a name
# fits several lines, the first one counts; a number that no data sheet gives is missing. MI250X: of each half, which is
# a device to torch.
_PEAKS: dict[str, tuple[float | None, ...]] = {
    "B200": (2250, None, None, None),
    "GH200": (989.4, 494.7, 66.9, 66.9),
    "H200 NVL": (835.5, 417.7, 60, 60),
    "H200": (989.4, 494.7, 66.9, 66.9),
    "H100 NVL": (835.5, 417.7, 60, 60),
    "H100 PCIe": (756, 378, 51, 51),
    "H100": (989.4, 494.7, 66.9, 66.9),
    "A100": (312, 156, 19.5, 19.5),
    "A30": (165, 82, 10.3, 10.3),
    "A10": (125, 62.5, 31.2, None),
    "L40S": (362, 183, 91.6, None),
    "L40": (181, 90.5, 90.5, None),
    "L4": (121, 60, 30.3, None),
    "MI300X": (1307.4, 653.7, 163.4, 163.4),
    "MI250X": (191.5, None, 47.9, 47.9),
}
_COLUMNS = {"bf16": 0, "fp16": 0, "tf32": 1, "fp32": 2, "fp64": 3}


def peak_flops(name: str, arithmetic: str) -> float | None:
    """Operations a second of the device of this name in bf16, fp16, tf32, fp32 or fp64; None: they are not known."""
    words = set(name.replace("-", " ").split())
    for known, peaks in _PEAKS.items():
        if set(known.split()) <= words and "MIG" not in words:  # of a part of a device no data sheet tells
            most = peaks[_COLUMNS[arithmetic]]
            return most and most * 1e12
    return None
