"""For tiny/pretrain.py on a GPU. The model has 27 M parameters and reads a million answers of up to 211
tokens; the default base reads 160,000 of up to 85. config/larger.py trains it further. It was not measured
yet.
"""
difficulty = 3
train_prompts = 50000
harder_prompts = 50000
layers = 8
hidden_size = 512
intermediate_size = 1536
heads = 8
steps = 4000
batch_size = 256
