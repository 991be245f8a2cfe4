"""Shift, documents and counts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedce import count_valid, fused_ce, fused_cross_entropy, fused_logprobs, shift_labels
from fusedce.contract.labels import bad_label_code, bad_label_message


def test_labels_shift_by_the_offset():
    labels = torch.arange(1, 9).view(2, 4)
    assert shift_labels(labels).tolist() == [[2, 3, 4, -100], [6, 7, 8, -100]]
    assert shift_labels(labels, offset=2).tolist() == [[3, 4, -100, -100], [7, 8, -100, -100]]
    assert shift_labels(labels, offset=0).equal(labels)
    assert shift_labels(labels, offset=9).eq(-100).all()
    assert shift_labels(labels.int(), ignore_index=-1).dtype == torch.int32


def test_what_follows_the_last_border_is_a_document_too():
    labels = torch.arange(10, 18)[None]
    wanted = [[11, 12, -100, 14, -100, 16, 17, -100]]
    for borders in ([0, 3, 5, 8], [0, 3, 5]):
        cu_seqlens = torch.tensor(borders, dtype=torch.int32)
        assert shift_labels(labels, cu_seqlens=cu_seqlens).tolist() == wanted
        assert count_valid(labels, cu_seqlens=cu_seqlens) == 5


@settings(max_examples=100, deadline=None)
@given(
    documents=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    offset=st.integers(0, 4),
    dtype=st.sampled_from([torch.int64, torch.int32]),
    ignore_index=st.sampled_from([-100, 0, 7]),
    named_by=st.sampled_from(["position_ids", "cu_seqlens"]),
    seed=st.integers(0, 2**16),
)
def test_any_documents_are_those_shifted_one_by_one(
    documents, offset, dtype, ignore_index, named_by, seed
):
    rng = torch.Generator().manual_seed(seed)
    each = [torch.randint(10, (n,), generator=rng).to(dtype) for n in documents]
    borders = torch.tensor([0, *documents]).cumsum(0)
    # a document of no token has no position, and a border twice
    options = {
        "position_ids": {"position_ids": torch.cat([torch.arange(n) for n in documents])[None]},
        "cu_seqlens": {"cu_seqlens": borders.int()},
    }[named_by] | {"offset": offset, "ignore_index": ignore_index}
    wanted = [[*x[offset:].tolist(), *[ignore_index] * min(offset, len(x))] for x in each]
    wanted = [label for document in wanted for label in document]
    labels = torch.cat(each)[None]
    assert shift_labels(labels, **options).tolist() == [wanted]
    valid = sum(label != ignore_index for label in wanted)
    assert count_valid(labels, **options) == valid
    alone = sum(int(count_valid(x, offset=offset, ignore_index=ignore_index)) for x in each)
    assert alone == valid


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32])
def test_narrow_positions_do_not_wrap_at_a_border(dtype):
    first, last = 0, min(torch.iinfo(dtype).max, 300)
    if dtype == torch.int8:
        first = -128
    positions = torch.arange(first, last + 1).repeat(2)[None]
    labels = torch.arange(positions.numel())[None]
    exact = shift_labels(labels, position_ids=positions)
    assert (exact == -100).sum() == 2
    assert shift_labels(labels, position_ids=positions.to(dtype)).equal(exact)
    n = positions.numel() - 2
    assert count_valid(labels, position_ids=positions) == n
    assert count_valid(labels, position_ids=positions.to(dtype)) == n


def test_a_target_whose_position_is_not_the_next_one_does_not_count():
    """Documents may begin past 0, where their first tokens were cut off."""
    labels, positions = torch.arange(10, 16)[None], torch.tensor([[0, 1, 5, 6, 6, 9]])
    found = shift_labels(labels, position_ids=positions)
    assert found.tolist() == [[11, -100, 13, -100, -100, -100]]


def test_count_is_after_the_shift():
    labels = torch.tensor([[5, 6, -100], [7, -100, -100]])
    assert count_valid(labels).item() == 1
    assert count_valid({"labels": labels}).item() == 1
    assert count_valid(labels, offset=0).item() == 3


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"labels": torch.zeros(3)}, TypeError, "int64 or int32"),
        ({"labels": [1]}, TypeError, "must be a tensor"),
        ({"labels": torch.tensor(1)}, ValueError, "at least one dimension"),
        ({"offset": -1}, ValueError, "offset must be >= 0"),
        ({"offset": 1.0}, TypeError, "offset must be an int"),
        ({"position_ids": torch.zeros(2, dtype=torch.long)}, ValueError, "position_ids"),
        ({"cu_seqlens": torch.tensor([0, 9])}, ValueError, "rise from 0 to at most T=3"),
        ({"cu_seqlens": torch.tensor([1, 3])}, ValueError, "rise from 0"),
        (
            {"cu_seqlens": torch.tensor([0, 3]), "position_ids": torch.arange(3)},
            ValueError,
            "not both",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 3]), "labels": torch.zeros(2, 3, dtype=torch.long)},
            ValueError,
            "one packed row",
        ),
    ],
)
def test_bad_input_is_named(kwargs, error, message):
    with pytest.raises(error, match=message):
        shift_labels(**({"labels": torch.arange(3)} | kwargs))


@pytest.mark.parametrize("position", [0, 17, 2**31 - 1])
@pytest.mark.parametrize("value", [-1, -(2**31), 2**31 - 1, 50257])
def test_a_bad_label_survives_its_code(position, value):
    code = int(bad_label_code(torch.tensor(position), torch.tensor(value)))
    assert -(2**63) <= code < 0
    got = f"{value} or beyond" if abs(value) > 2**30 else value  # the largest a code holds
    assert f"got {got} at flattened position {position}" in bad_label_message(code)


def test_rows_that_were_flattened_before_the_shift_are_warned_of():
    """Only where it is certain: a view of several rows, without marks of documents."""
    rows = torch.randint(50, (3, 4))
    for flat in (rows.view(-1), rows.flatten()):
        with pytest.warns(
            UserWarning, match=r"labels are 3 sequences in one dimension.*view\(-1\)"
        ):
            shift_labels(flat)
        with pytest.warns(UserWarning, match="3 sequences"):
            count_valid(flat)


def test_one_row_is_not_warned_of(recwarn):
    rows = torch.randint(50, (3, 4))
    shift_labels(rows[0])
    shift_labels(rows[:1].view(-1))
    shift_labels(torch.randint(50, (12,)))
    shift_labels(rows.view(-1), offset=0)
    shift_labels(rows.view(-1), cu_seqlens=torch.tensor([0, 4, 8, 12]))
    shift_labels(rows.view(-1), position_ids=torch.arange(4).repeat(3))
    assert not recwarn.list


# ---- labels of a loss --------------------------------------------------------------------------

BACKENDS = ["torch", "triton"]
H, V = 8, 13


def inputs(n):
    rng = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(n, H, generator=rng), torch.randn(V, H, generator=rng)
    return hidden, weight, torch.randint(V, (n,), generator=rng)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [2**31, 2**40, -(2**40), V, -1])
def test_a_bad_label_is_named_with_its_own_value(backend, value):
    hidden, weight, labels = inputs(4)
    labels[2] = value
    for function in (fused_ce, fused_cross_entropy, fused_logprobs):
        with pytest.raises(ValueError, match=f"got {value} at flattened position 2"):
            function(hidden, weight, labels, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_no_label_is_ignored(backend, dtype):
    hidden, weight, labels = inputs(6)
    labels = labels.to(dtype)
    out = fused_ce(hidden, weight, labels, ignore_index=None, backend=backend)
    assert out.n_valid == 6
    torch.testing.assert_close(out.loss_sum, fused_ce(hidden, weight, labels).loss_sum)
    for bad in (-100, torch.iinfo(dtype).min):
        labels[2] = bad
        with pytest.raises(ValueError, match=r"0 <= label < V=13: got -\d+ at flattened position"):
            fused_ce(hidden, weight, labels, ignore_index=None, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_argmax_out_that_shares_its_memory_is_named(backend):
    shared = torch.zeros(1, dtype=torch.int64).expand(5)
    with pytest.raises(ValueError, match="argmax_out must have memory of its own"):
        fused_ce(*inputs(5), argmax_out=shared, backend=backend)
