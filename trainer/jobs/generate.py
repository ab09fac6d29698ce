"""The job `generate`: a trained network continues a text."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import inf
from typing import Literal

import torch

from trainer.jobs.run_parts import Job, RunParts
from trainer.jobs.trained_run import Which, load_network, run_folder, select_checkpoint, wants_average
from trainer.launch.devices import accelerator_type
from trainer.launch.safe_files import make_folder, open_file
from trainer.learning.generation_request import GenerationRequest
from trainer.messages import Refusal


class Generate(Job):
    """Print the continuation of a prompt, and keep it. The main rank does it by itself, on its device."""

    def __init__(
        self,
        prompt: str = "\n",
        tokens: int = 200,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
        checkpoint: Which = "best",
        weights: Literal["plain", "ema"] | None = None,
    ) -> None:
        if tokens < 1 or not 0 <= temperature < inf or (top_k is not None and top_k < 1):
            raise Refusal(
                f"job.tokens={tokens}, job.temperature={temperature}, job.top_k={top_k}: tokens and top_k are 1 or"
                " more, temperature is 0 or more"
            )
        if not prompt:
            raise Refusal("job.prompt is empty; a network continues at least one token: job.prompt='The '")
        self.request = GenerationRequest(prompt, tokens, temperature, top_k, seed)
        self.checkpoint, self.weights = checkpoint, weights

    def __call__(self, run: RunParts) -> int:
        """Generate; the exit code."""
        if not run.machine.launch.is_main:  # the others have nothing to do
            return 0
        # before a network is built
        self.request.refuse_data("job=generate", run.data)
        checkpoint = select_checkpoint(run, self.checkpoint)
        network = load_network(run, checkpoint.path, wants_average(run, self.weights))
        self.request.refuse_network("job=generate", network)
        # one device is enough for one sequence
        device = torch.device("cpu" if run.machine.device == "cpu" else accelerator_type() or "cpu")
        text = self.request.generate(network.to(device), run.data, device)
        print(text)
        request = asdict(self.request)
        line = {"checkpoint": checkpoint.step, "prompt": request.pop("prompt"), "text": text, **request}
        path = run_folder(run) / "generate" / "samples.jsonl"
        make_folder(path.parent)
        with open_file(path, "ab") as file:
            # a line for each call of the job
            file.write(json.dumps(line).encode() + b"\n")
        return 0
