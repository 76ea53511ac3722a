"""
What photos cost on the host: a prompt with one is encoded, as when a step draws it, by the processor of
Qwen2.5-VL with its own sizes. It needs torchvision, which requirements-cpu.txt leaves out.

    python -m bench.photos
"""
import io
import time
from types import SimpleNamespace

import numpy as np
from PIL import Image

from bench.image_families import make
from config import sampling
from configurator import configure
from data import encode_rows
from options.images import MARK, data_uri, load_reader, picture_of
from runtime.model_folder import load_tokenizer
# ------------------------------------------------------------------------------------------------------------
folder = "out/photos"           # of the model, which has random weights
photos = 20
side = 1000                     # pixels
# ------------------------------------------------------------------------------------------------------------


def photo(number):
    """Return the bytes of a JPEG file with a pattern that is no plainer than a photo."""
    noise = np.random.default_rng(number).integers(256, size=(side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(np.cumsum(noise, 0).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def main():
    """Print the time to encode a prompt and to read its file, and the memory that its pixels take."""
    make("qwen2_5_vl", folder)
    tokenizer = load_tokenizer(folder)
    settings = SimpleNamespace(**vars(sampling) | {"images": "frozen"})
    reader = load_reader(settings, folder, tokenizer)
    reader.processor.image_processor.patch_size = 14
    reader.processor.image_processor.size = {"shortest_edge": 3136, "longest_edge": 12845056}
    files = [photo(number) for number in range(photos)]
    prompt = [{"role": "user", "content": f"{MARK}How many?"}]
    rows = [(f"row {i}", {"prompt": prompt, "images": [data_uri(file)]}) for i, file in enumerate(files)]
    begin = time.perf_counter()
    prompts = encode_rows(tokenizer, rows)
    encoding = (time.perf_counter() - begin) / photos
    picture_of.cache_clear()
    begin = time.perf_counter()
    for _, row in rows:
        picture_of(row["images"][0])
    opening = (time.perf_counter() - begin) / photos
    print(f"A file has {len(files[0]) / 1e3:.0f} kB and its prompt {len(prompts[0].ids)} tokens. Encoding takes "
          f"{encoding:.2f} s, of which {opening:.2f} s to read the file; pixels take {reader.size / photos / 1e6:.1f} MB.")


if __name__ == "__main__":
    configure(globals())
    main()
