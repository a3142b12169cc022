"""Checkpoints and exports of sharded models: other numbers of ranks go on, damage is named, nothing is held twice."""

import json
import resource
import shutil
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gpubound.distributed import join
from gpubound.distributed.local_shard import export
from gpubound.errors import DataError
from gpubound.models import Decoder, DecoderConfig, load_hf, save_hf, storing
from gpubound.train.checkpoint import Checkpoints, open_checkpoint
from gpubound.train.checkpoint.checkpoints import convert_tensors
from tests.distributed.processes import RankFailed, each_on_ranks, on_ranks
from tests.messages import message, refusal

ROWS = 8  # of a step, whatever the number of ranks


def made(kind, world):
    """A model whose first sides are 7, 5 and 1: no number of ranks divides them. Alone it is plain."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5, bias=False), nn.Tanh(), nn.Linear(5, 1)).double()
    wrapped: nn.Module = model
    if kind == "shards":
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
    elif kind == "replicas" and world > 1:
        wrapped = DistributedDataParallel(model)
    return model, wrapped, torch.optim.AdamW(model.parameters(), lr=0.1)


def trained(folder, kind, until, save=False):
    """Losses by step: from the newest checkpoint, if there is one, to step `until`."""
    with join("cpu") as ranks:
        model, wrapped, optimizer = made(kind, ranks.world)
        store, done, losses = Checkpoints(folder, ranks=ranks), 0, {}
        found = store.latest()
        if found is not None:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()  # makes its state, which is overwritten below
            live = state_of(model, optimizer)
            assert found.tensors(like=live).keys() == live.keys()
            done = found.step
        for step in range(done + 1, until + 1):
            x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            own = x[ranks.rank :: ranks.world]
            loss = (wrapped(own) - own.sum(1, keepdim=True).sin()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = sum(ranks.gather(loss.item())) / ranks.world
        if save:
            store.save(until, state_of(model, optimizer), {"world": ranks.world}, wait=True)
            store.wait()
        return losses


def state_of(model, optimizer):
    names = {id(p): name for name, p in model.named_parameters()}
    state = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    for p, kept in optimizer.state.items():
        state |= {f"optimizer.{names[id(p)]}.{key}": value for key, value in kept.items()}
    return state


def test_another_number_of_ranks_goes_on_where_a_run_was(tmp_path):
    """Plain fp64 training in this process is the definition. Two ranks of shards, then four, then two replicas, one process,
    then two of shards again: each goes on from what the one before has written."""
    unbroken = on_ranks(1, trained, tmp_path / "unbroken", "plain", 10)[0]
    losses = {}
    for world, kind, until in ((2, "shards", 2), (4, "shards", 4), (2, "replicas", 6), (1, "plain", 8), (2, "shards", 10)):
        each = on_ranks(world, trained, tmp_path / "moved", kind, until, True)
        assert all(other == each[0] for other in each)
        losses |= each[0]
    assert losses == pytest.approx(unbroken, abs=1e-6) and len(losses) == 10
    forms = {int(path.name[-2:]): open_checkpoint(path).sharded for path in (tmp_path / "moved").iterdir()}
    assert forms == {6: False, 8: False, 10: True}


def saved(folder, steps, keep=3):
    with join("cpu") as ranks:
        model, _, optimizer = made("shards", ranks.world)
        store = Checkpoints(folder, keep=keep, ranks=ranks)
        for step in steps:
            for p in model.parameters():
                p.data.fill_(float(step))
            store.save(step, state_of(model, optimizer), {"twice": 2 * step}, wait=True)


def found(folder):
    with join("cpu") as ranks:
        newest = Checkpoints(folder, ranks=ranks).latest()
        return newest and newest.step


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder with two checkpoints of two ranks."""
    folder = tmp_path_factory.mktemp("two")
    on_ranks(2, saved, folder, (1, 2))
    return folder


def test_damage_to_one_ranks_file_is_found_by_all_and_named(two, tmp_path):
    for rank, damage in ((1, "flipped"), (0, "cut off"), (1, "lost")):
        shutil.copytree(two, tmp_path / damage)
        file = tmp_path / damage / "step-00000002" / f"__{rank}_0.distcp"
        payload = bytearray(file.read_bytes())
        payload[len(payload) // 2] ^= 1
        file.unlink() if damage == "lost" else file.write_bytes(payload if damage == "flipped" else payload[:-9])
        with pytest.raises(DataError, match=rf"step-00000002 is .*__{rank}_0\.distcp"):
            open_checkpoint(file.parent)
    ranks = each_on_ranks(2, {folder.name: partial(found, folder) for folder in tmp_path.iterdir()})
    assert ranks == {"flipped": [1, 1], "cut off": [1, 1], "lost": [1, 1]}


def test_a_table_that_names_a_program_is_not_run(tmp_path):
    import os
    import pickle

    from gpubound.distributed.sharded_checkpoint import shapes

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(DataError, check=message("parallel/saved:a_table_that_names_a_pro")):
        shapes(tmp_path)
    assert not (tmp_path / "ran").exists()


def fails_on_one(folder, stage):
    """What each rank hears where rank 1's disk is full in a stage of the second checkpoint; then a third goes well."""
    import gpubound.train.checkpoint.checkpoints as home
    from gpubound.distributed import sharded_checkpoint as shards
    from gpubound.train.checkpoint import files

    with join("cpu") as ranks:
        store, tensors = Checkpoints(folder, ranks=ranks), made("shards", ranks.world)[0].state_dict()
        store.save(1, tensors, {}, wait=True)
        owner, name = {
            "write": (shards._SavePlanner, "resolve_data"), "staging": (home.Staging, "give"), "sync": (files, "flush"),
        }[stage]  # fmt: skip
        whole = getattr(owner, name)

        def full(*_):
            raise OSError(28, "No space left on device")

        if ranks.rank == 1:
            setattr(owner, name, full)
        store.save(2, tensors, {})
        with pytest.raises(DataError) as error:
            store.wait()
        setattr(owner, name, whole)
        store.save(3, tensors, {}, wait=True)
        return str(error.value)


def test_a_full_disk_of_one_rank_is_said_by_its_name_and_costs_nothing(tmp_path):
    works = {stage: partial(fails_on_one, tmp_path / stage, stage) for stage in ("staging", "write", "sync")}
    for stage, ranks in each_on_ranks(2, works).items():
        assert set(ranks) == {
            f"the checkpoint could not be written: rank 1: [Errno 28] No space left on device; earlier checkpoints in "
            f"{tmp_path / stage} are intact. Free space or choose another folder."
        }
        assert sorted(p.name for p in (tmp_path / stage).iterdir()) == ["step-00000001", "step-00000003"]


def limited(folder, owner, sharded):
    """What each rank hears where the system lets `owner` write no file beyond 64 KiB, in the second checkpoint of three."""
    with join("cpu") as ranks:
        torch.manual_seed(0)
        model = nn.Linear(256, 256)
        tensors = (fully_shard(model) if sharded else model).state_dict()
        store, said = Checkpoints(folder, ranks=ranks), ""
        for step in (1, 2, 3):
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            if step == 2 and ranks.rank == owner:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
            try:
                store.save(step, tensors, {}, wait=True)
            except DataError as error:
                said = str(error)
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        newest = store.latest()
        return said, newest.step, newest.tensors(like=tensors)["weight"] is tensors["weight"]


@pytest.mark.parametrize("owner, sharded", [(1, True), (0, False)], ids=["shards", "replicas"])
def test_a_file_that_the_system_refuses_is_said_by_its_ranks_name(tmp_path, owner, sharded):
    """No mock: the write fails in the middle of a file, as on a full disk. The next save, which has room, is whole."""
    (said, *rest), other = on_ranks(2, limited, tmp_path, owner, sharded)
    assert other == (said, *rest) and rest == [3, True]
    assert (
        "File too large" in said
        and message("parallel/saved:a_file_that_the_system_r", owner).within(said)
        and said.count("rank ") == 1
    ), said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def parted(folder):
    with join("cpu") as ranks:
        tensors = made("shards", ranks.world)[0].state_dict() | {"scales": torch.tensor([1.0, 2.0 + ranks.rank])}
        return refusal(DataError, lambda: Checkpoints(folder, ranks=ranks).save(1, tensors, {}, wait=True))


def test_what_each_rank_holds_otherwise_is_not_saved_as_if_it_were_one(tmp_path):
    said = on_ranks(2, parted, tmp_path)
    assert said[0] == said[1] and message("parallel/saved:what_each_rank_holds_oth").within(said[0])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("masters_there", [True, False])
def test_masters_of_replicas_are_the_weights_of_shards(tmp_path, masters_there):
    """And the other way round: in either form the fp32 weight is taken up, not what was rounded."""
    fine = torch.linspace(1, 2, 40).reshape(8, 5)
    replicas = {"model.w": fine.bfloat16(), "step.master.w": fine.clone(), "step.m.w": -fine}
    shards = {"model.w": fine.clone(), "step.m.w": -fine}
    store = Checkpoints(tmp_path)
    store.save(1, replicas if masters_there else shards, {}, wait=True)
    live = {name: torch.zeros_like(t) for name, t in (shards if masters_there else replicas).items()}
    got = convert_tensors(store.latest(), live)
    wanted = shards if masters_there else replicas
    assert got.keys() == live.keys() and all(got[name] is live[name] for name in live)
    assert all(torch.equal(live[name], t) for name, t in wanted.items())


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
    said = refusal(RankFailed, lambda: on_ranks(2, cannot_write, tmp_path))
    assert said.count("RankError: rank 0: [Errno 28] No space left on device") == 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == old
