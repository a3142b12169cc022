"""What the tests of `gpubound train` share: a config file of a run that takes a second."""

import pytest

from gpubound import device as facts

from .train.runs import build_corpus, recipe, train


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return build_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture
def config(corpus, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        f"model: tiny\ndata: {corpus}\nseq: 32\nmicro_batch: 4\nsteps: 6\nlr: 3e-3\nvalidation: 0.1\n"
        f"device: cpu\nout: {tmp_path / 'run'}\n"
    )
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts, "interpreted", lambda: False)
        run, _ = train(recipe(build_corpus(folder / "corpus"), folder / "run", steps=1))
        return str(run.export(folder / "hf"))
