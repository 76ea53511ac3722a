"""For tiny.py: the small model of config/guess.py and config/calculator.py.

    python tiny.py config/episodes_base.py --out=out/episodes_base --weights=tiny_episodes.safetensors
"""
transcripts = "environments/transcripts.py:draw"
steps = 1000
