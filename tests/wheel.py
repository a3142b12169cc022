"""Build the sdist and the wheel, install the wheel in an empty environment, and run its commands: `make wheel`.

The wheel's requirements come from this environment: torch alone would be a download of minutes.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = """\
import torch

device = torch.accelerator.current_accelerator() or torch.device("cpu")
model = torch.nn.Linear(8, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    loss = model(torch.rand(4, 8).to(device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


def run(*command: object, code: int = 0, **options: object) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # the caller's source
    done = subprocess.run([str(word) for word in command], text=True, capture_output=True, env=environment, **options)
    assert done.returncode == code, f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def main() -> int:
    dist = ROOT / "dist"
    for old in dist.glob("gpubound-*"):
        old.unlink()
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, ROOT)
    (wheel,) = dist.glob("gpubound-*.whl")
    (sdist,) = dist.glob("gpubound-*.tar.gz")
    with tempfile.TemporaryDirectory(prefix="wheel-") as folder:
        environment = Path(folder, "venv")
        venv.create(environment)
        python, gpubound = environment / "bin/python", environment / "bin/gpubound"
        pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
        run(*pip, "install", "--quiet", "--no-deps", wheel)
        packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        for package in sorted(Path(sysconfig.get_path("purelib")).iterdir()):
            if not package.name.startswith(("gpubound", "_editable", "__editable", "pip")) and package.suffix != ".pth":
                target = Path(packages, package.name)
                if not target.exists():
                    target.symlink_to(package)
        where = run(python, "-c", "import gpubound; print(gpubound.__file__)", cwd=folder).strip()
        assert where.startswith(packages), f"{where} is not the wheel's"
        script = Path(folder, "loop.py")
        script.write_text(SCRIPT)
        print(run(gpubound, "--version", cwd=folder).strip())
        run(gpubound, "train", "--list", cwd=folder)
        verdict = run(gpubound, "doctor", "--dry-run", "--out", Path(folder, "report"), script, cwd=folder)
        assert "loss.item()" in verdict and Path(folder, "report/doctor.html").exists(), verdict
        run(gpubound, "demo", "--out", Path(folder, "demo"), "--steps", 2, "--device", "cpu", cwd=folder)
        assert Path(folder, "demo/report.html").exists()
    print(f"{wheel.name} and {sdist.name}: built; the wheel runs in an empty environment")
    return 0


if __name__ == "__main__":
    sys.exit(main())
