"""`gpubound completion`: what bash completes by the printed script; zsh runs the same function, fish gets a line an option."""

import shutil
import subprocess

import pytest

from gpubound import cli


@pytest.fixture(scope="module")
def scripts():
    import contextlib
    import io

    texts = {}
    for shell in ("bash", "zsh", "fish"):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert cli.main(["completion", shell]) == 0
        texts[shell] = out.getvalue()
    return texts


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["tr"], {"train"}),
        ([""], set(cli.COMMANDS)),
        (["generate", "--top"], {"--top-k", "--top-p"}),
        (["train", "--micro"], {"--micro-batch"}),
        (["completion", "z"], {"zsh"}),
        (["report", "nothing"], set()),
    ],
)
def test_bash_completes(scripts, words, completed):
    line = " ".join(f"'{word}'" for word in ["gpubound", *words])
    ask = f'COMP_WORDS=({line}); COMP_CWORD={len(words)}; _gpubound; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", f"{scripts['bash']}\n{ask}"], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == completed and not done.stderr


def test_the_other_shells_get_the_same_words(scripts):
    assert scripts["zsh"].endswith(scripts["bash"]) and "bashcompinit" in scripts["zsh"].splitlines()[0]
    lines = scripts["fish"].splitlines()
    assert all(line.startswith("complete -c gpubound -n ") for line in lines)
    assert (
        sum(" -a train " in line for line in lines) == 1 and sum(line.endswith('train" -l micro-batch') for line in lines) == 1
    )
