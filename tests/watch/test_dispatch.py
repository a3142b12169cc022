"""Which copies need not have been made, told apart from those that look like them."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gpubound.watch.events import Place
from gpubound.watch.sensors import SAMPLE, Clones, Uploads, repeats_layout

aten = torch.ops.aten
GPU = torch.device("cuda", 0)


def test_an_upload_is_repeated_only_while_nothing_was_written():
    uploads, x = Uploads(), torch.zeros(4 * SAMPLE, dtype=torch.uint8)
    assert [uploads.again(x, GPU), uploads.again(x, GPU), uploads.again(x, torch.device("cuda", 1))] == [False, True, False]
    x[1] = 1  # a byte beside the sample: only the version counter knows
    assert [uploads.again(x, GPU), uploads.again(x, GPU)] == [False, True]
    x.numpy()[0] = 1  # behind the version counter: only the sample knows
    assert [uploads.again(x, GPU), uploads.again(x, GPU)] == [False, True]
    with torch.inference_mode():
        y = torch.ones(3)  # it has no version counter
    assert [uploads.again(y, GPU), uploads.again(y, GPU)] == [False, True]
    assert [uploads.again(x, GPU, step) for step in (1, 2, 9, 9)] == [True, True, False, True], "step 9 is of another epoch"


def test_another_storage_at_a_dead_ones_address_is_another_upload():
    uploads, x = Uploads(), torch.zeros(4)
    uploads.again(x, GPU)
    gone = StorageWeakRef(torch.zeros(1).untyped_storage())
    uploads._uploaded = {key: (gone, *rest) for key, (_, *rest) in uploads._uploaded.items()}
    assert [uploads.again(x, GPU), uploads.again(x, GPU)] == [False, True]


def test_what_is_remembered_of_uploads_does_not_grow_without_end():
    uploads = Uploads()
    for _ in range(5000):
        uploads.again(torch.zeros(1), GPU)
    assert len(uploads._uploaded) <= 4098


def test_a_clone_is_dead_when_its_source_dies_unused():
    clones = Clones()
    used, unused, part = torch.ones(4), torch.ones(8), torch.ones(4)
    for source in (used, unused, part[:2], torch.ones(0)):
        clones.cloned(source, Place())
    clones.used((used,), {})
    assert clones.dead() == []
    del used, unused, part, source
    assert [candidate.bytes for candidate in clones.dead()] == [32]
    assert clones.dead() == []


def test_a_source_is_used_by_a_keyword_too():
    clones, source = Clones(), torch.ones(4)
    clones.cloned(source, Place())
    clones.used((), {"other": source})
    del source
    assert clones.dead() == []


def test_only_so_many_clones_are_followed():
    clones = Clones()
    kept = [torch.ones(1) for _ in range(2 * Clones.LIMIT)]
    for source in kept:
        clones.cloned(source, Place())
    del kept, source
    assert len(clones.dead()) == Clones.LIMIT


def test_a_copy_that_changes_something_repeats_no_layout():
    x = torch.ones(2, 3, 4, 5)
    clone, to = aten.clone.default, aten._to_copy.default
    assert repeats_layout(clone, (x,), {}) and repeats_layout(to, (x,), {"dtype": torch.float32, "device": "cpu"})
    assert not repeats_layout(to, (x,), {"dtype": torch.float64})
    assert not repeats_layout(to, (x,), {"device": "meta"})
    assert not repeats_layout(clone, (x,), {"memory_format": torch.channels_last})
    assert repeats_layout(clone, (x.to(memory_format=torch.channels_last),), {"memory_format": torch.channels_last})
    assert not repeats_layout(clone, (x[:, :, 1:],), {}) and not repeats_layout(aten.add.Tensor, (x, x), {})
