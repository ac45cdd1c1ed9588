"""Checksums of tensors that a step may change."""

import torch

from lightning_unified.step.undo.tensors import checksum


def test_one_entry_of_a_column_has_the_checksum_of_its_copy():
    columns = torch.arange(8.0).view(2, 4)

    for part in (columns[:1, 1], columns[1:, 1:2], columns[:, 1]):
        assert torch.equal(checksum(part), checksum(part.clone(memory_format=torch.contiguous_format)))
