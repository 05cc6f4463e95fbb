"""Findings on FP32 values of one origin are one finding, with the lines that read them."""

import math

import torch
from torch import Tensor, nn

import auditor
from auditor.records import Finding
from auditor.rulebook.failures import judge_failures
from auditor.rulebook.findings import classify
from auditor.rulebook.load import load_rules
from tests.support.capturing import captured

RULES = tuple(rule for rule in load_rules() if rule.family in ("dtypes", "runs"))


class Block(nn.Module):
    """A convolution, and a projection of the embedding of time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.emb, self.norm = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 8), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return x + self.conv(self.norm(x)) + self.emb(time)[:, :, None]


class Denoiser(nn.Module):
    """Sines of the time, in FP32, which every block reads."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(1e4) * torch.arange(4, dtype=torch.float32) / 4)
        angles = time[:, None].float() * frequencies
        embedding = torch.cat([angles.cos(), angles.sin()], -1)
        for block in self.blocks:
            x = block(x, embedding)
        return x * self.head(embedding)[:, :, None]


INPUTS = (torch.randn(2, 8, 8), torch.tensor([3, 500]))


def judged(model: nn.Module) -> list[Finding]:
    """The findings, where the run that is cast raised at the first."""
    toy = captured(model, *INPUTS)
    found = classify(toy.capture, toy.facts, RULES)
    return list(judge_failures(found, {("cast", "fp16"): f"mixed ({found[0].source})"}, toy.capture, RULES))


def test_blocks_that_read_one_fp32_embedding_are_one_finding() -> None:
    (found,) = judged(Denoiser(9))
    assert (found.rule, found.owner) == ("DTY002", "blocks.0.emb")
    assert "`self.emb(time.to(self.emb.weight.dtype))`" in found.message
    assert "`self.head(embedding.to(self.head.weight.dtype))`" in found.message
    assert "9 more operations raise" in found.message  # in 8 more blocks, and the head; what reads the repaired is low


def test_values_of_two_origins_are_two_findings() -> None:
    class Twice(Denoiser):
        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            return super().forward(torch.lerp(x, -x, torch.linspace(0, 1, 8)), time)

    assert [found.rule for found in judged(Twice(2))] == ["DTY005", "DTY002"]


def test_the_fixes_of_the_one_finding_repair_the_model() -> None:
    class Mended(Denoiser):
        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            frequencies = torch.exp(-math.log(1e4) * torch.arange(4, dtype=torch.float32) / 4)
            angles = time[:, None].float() * frequencies
            embedding = torch.cat([angles.cos(), angles.sin()], -1)
            for block in self.blocks:
                x = block(x, embedding.to(block.emb.weight.dtype))
            return x * self.head(embedding.to(self.head.weight.dtype))[:, :, None]

    audit = auditor.audit(Mended(2), INPUTS, formats=("fp16",), strategies=("cast",))
    assert [found.rule for found in audit.findings if found.rule.startswith(("DTY", "RUN"))] == []


class Messages(nn.Module):
    """Sums of messages at nodes, in FP32 tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.message, self.update = nn.Linear(8, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        total = torch.zeros(x.shape[0], 8)
        total = total.index_add(0, index, self.message(x)[index])
        count = torch.zeros(x.shape[0], 1).index_add(0, index, torch.ones(index.shape[0], 1))
        return self.update(torch.cat([x, total / count.clamp(min=1)], -1))


GRAPH = (torch.randn(4, 8), torch.tensor([0, 1, 1, 3]))


def test_sums_of_terms_stay_in_fp32_and_their_terms_are_converted() -> None:
    toy = captured(Messages(), *GRAPH)
    fixes = [found.evidence["dtype_fix"] for found in classify(toy.capture, toy.facts, RULES)]
    assert fixes[0].startswith("`total.index_add(0, index, self.message(x)[index].to(total.dtype))`")
    assert fixes[-1].startswith(
        "`self.update(torch.cat([x, total / count.clamp(min=1)], -1).to(self.update.weight.dtype))`"
    )


class Written(nn.Module):
    """Adds values to an FP32 tensor, which the next layer reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.values, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        total = torch.zeros(6, 16)
        total = total.index_add(0, index, self.values(x))
        return self.head(total)


def test_the_tensor_that_values_are_written_into_stays_fp32_for_its_readers() -> None:
    toy = captured(Written(), torch.randn(9, 8), torch.arange(9) % 6)
    found = {found.rule: found for found in classify(toy.capture, toy.facts, RULES)}
    written, read = found["DTY001"], found["DTY002"]
    assert "index_add(0, index, self.values(x).to(total.dtype))" in written.evidence["dtype_fix"]
    assert "Convert the values in the line that writes them" in written.advice
    assert "self.head(total.to(self.head.weight.dtype))" in read.evidence["dtype_fix"]
    assert "Convert the values in the line that reads them" in read.advice
