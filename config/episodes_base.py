"""For tiny/pretrain.py: the small model of config/guess.py and config/calculator.py, which is shipped as
tiny/episodes.

    python -m tiny.pretrain config/episodes_base.py --out=out/episodes
"""
transcripts = "tiny/transcripts.py:draw"
steps = 1000
