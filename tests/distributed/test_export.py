"""A sharded model in a Hugging Face folder: tensor by tensor, in files of a size, never held twice."""

import json
import weakref

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gpubound.distributed import join
from gpubound.distributed.local_shard import export
from gpubound.models import Decoder, DecoderConfig, load_hf, save_hf, storing
from tests.distributed.processes import RankFailed, on_ranks

FILE = 30_000  # bytes of a file; the largest tensor has 101 * 48 * 4 = 19,392


def model(tied):
    torch.manual_seed(0)
    shape = {"hidden": 48, "intermediate": 80, "layers": 2, "heads": 4, "kv_heads": 2, "vocabulary": 101}
    return Decoder(DecoderConfig(**shape, tied=tied, qk_norm=True))


class Live:
    """The bytes of whole tensors that are alive at once."""

    def __init__(self):
        self.now = self.most = self.largest = 0
        self.whole = DTensor.full_tensor

    def full_tensor(self, tensor):
        found = self.whole(tensor)
        size = found.nbytes
        self.now, self.largest = self.now + size, max(self.largest, size)
        self.most = max(self.most, self.now)
        weakref.finalize(found, self.gone, size)
        return found

    def gone(self, size):
        self.now -= size


def exported(folder, tied):
    live = Live()
    DTensor.full_tensor = lambda tensor: live.full_tensor(tensor)
    storing.LARGEST_FILE = FILE
    with join("cpu") as ranks:
        ours = model(tied)
        for block in ours.model.layers:
            fully_shard(block)
        fully_shard(ours)
        export(lambda weights: save_hf(ours, folder, weights=weights, overwrite=True), storing.stored_state(ours), ranks)
        return live.most, live.largest, sum(p.numel() * 4 for p in ours.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_what_ranks_exported_shard_by_shard(tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "model.safetensors").write_bytes(b"of an older model")  # transformers would take it before an index
    first, second = on_ranks(2, exported, tmp_path, tied)
    assert first[0] <= FILE + first[1] and first[0] < first[2] / 3, "the first rank holds a file's tensors, and the next one"
    assert second[0] == second[1], "another rank holds one tensor at a time"
    table = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert sorted(set(table["weight_map"].values())) == files and len(files) > 3
    ours, ids = model(tied), torch.arange(12)[None]
    wanted = ours(ids)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()(ids).logits
    torch.testing.assert_close(theirs, wanted if isinstance(wanted, torch.Tensor) else wanted.logits, rtol=1e-4, atol=1e-5)
    back = load_hf(tmp_path).state_dict()
    assert all(torch.equal(back[name], t) for name, t in ours.state_dict().items())
    save_hf(ours, tmp_path, overwrite=True)  # in one file again
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]


def cannot_write(folder):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    storing.save_file = full
    return exported(folder, False)


def test_a_full_disk_ends_the_export_on_every_rank_and_leaves_the_old_model(tmp_path):
    save_hf(model(False), tmp_path)
    old = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RankFailed) as error:
        on_ranks(2, cannot_write, tmp_path)
    assert str(error.value).count("RankError: rank 0: [Errno 28] No space left on device") == 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == old
