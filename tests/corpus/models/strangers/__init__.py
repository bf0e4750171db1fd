"""Models of packages other than transformers, timm, torchvision and torchaudio, without changes.

`requirements.txt` pins the packages. They are installed beside torch and never replace it:

    pip install --no-deps --target FOLDER -r tests/corpus/models/strangers/requirements.txt
    PYTHONPATH=FOLDER python -m tests.corpus --only '^strangers/' --results strangers.jsonl
"""

from __future__ import annotations

from . import audio, control, diffusion, experts, graphs, later, more, physics, science, scores, tables, text, vision

FIELDS = (audio, control, diffusion, experts, graphs, later, more, physics, science, scores, tables, text, vision)
