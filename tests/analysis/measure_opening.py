"""How long the report of a long document takes to open, and to follow the slider. Not a test: numbers to read.

python tests/analysis/measure_opening.py [--tokens 200000]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from browser import opened
from made_report import write_made_report

MOVES = """async () => {
    const slider = document.getElementById('slider'), times = [];
    for (let i = 0; i < 40; i++) {
        const began = performance.now();
        slider.value = String(Math.round(i / 40 * slider.max));
        slider.dispatchEvent(new Event('input'));
        await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
        times.push(performance.now() - began);
    }
    return times.sort((a, b) => a - b)[20];
}"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=200_000)
    tokens = parser.parse_args().tokens
    with tempfile.TemporaryDirectory() as folder:
        write_made_report(Path(folder), tokens, {tokens // 2: 9.0})
        file = Path(folder) / "report.html"
        for attempt in range(3):
            began = time.perf_counter()
            with opened(file) as (page, problems):
                whole = time.perf_counter() - began
                inside = page.evaluate("Number(document.documentElement.dataset.ready) / 1000")
                move = page.evaluate(MOVES)
                print(
                    f"{attempt + 1}: {tokens:,} tokens, {file.stat().st_size / 1e6:.1f} MB; ready after {inside:.2f} s "
                    f"(with the browser's start {whole:.2f} s); slider: {move:.0f} ms; problems: {problems}"
                )


if __name__ == "__main__":
    main()
