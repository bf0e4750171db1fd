"""Models of packages outside of transformers, timm, torchvision and torchaudio, as they were published.

`requirements.txt` pins the packages.  They are installed beside torch, never over it:

    pip install --no-deps --target FOLDER -r tests/corpus/models/strangers/requirements.txt
    PYTHONPATH=FOLDER python -m tests.corpus --only '^strangers/' --results strangers.jsonl
"""

from __future__ import annotations

from . import audio, control, diffusion, experts, graphs, physics, science, scores, tables, text, vision

FIELDS = (audio, control, diffusion, experts, graphs, physics, science, scores, tables, text, vision)
