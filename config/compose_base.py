"""For tiny/pretrain.py: the small model of config/compose.py, which is shipped as tiny/compose.

    python -m tiny.pretrain config/compose_base.py --out=out/compose
"""
transcripts = "tiny/transcripts.py:compose"
hidden_size = 128
heads = 4
steps = 1500
