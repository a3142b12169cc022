"""Write the whole corpus into a folder: python -m benchmarks.doctor_corpus FOLDER"""

import json
import sys
from pathlib import Path

from .cases import CALM, cases, write_calm, write_clean, write_planted


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    folder, truth = Path(argv[0]), []
    for case in cases():
        script = write_planted(case, folder / "planted" / str(case))
        write_clean(case, folder / "clean" / str(case))
        truth.append({"case": str(case), "kinds": script.kinds, "lines": sorted(script.blamed)})
    for what, scripts in CALM.items():
        for name, calm in scripts.items():
            write_calm(calm, folder / what / name)
    (folder / "truth.json").write_text(json.dumps(truth, indent=1), encoding="utf-8")
    print(f"{len(truth)} planted scripts and as many clean ones, {', '.join(f'{len(s)} {w}s' for w, s in CALM.items())}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
