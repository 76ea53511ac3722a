"""The rows of GSM8K, which --task=gsm8k fetches. Runs of other tasks do not open this file."""
import os
import pickle

import torch

from data import naming
from options.files import Rows, file_rows


def gsm8k_rows(split):
    # Returns the Rows of GSM8K (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168) with verl's prompt. The
    # original files are kept in a cache folder.
    file, sha256 = {"train": ("train.jsonl", "17f347dc5147"), "eval": ("test.jsonl", "3730d312f6e3")}[split]
    url = f"https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/{file}"
    path = os.path.expanduser(f"~/.cache/gsm8k/{file}")
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with naming(f"gsm8k: {url} cannot be fetched to {path}"):
            torch.hub.download_url_to_file(url, path, sha256, progress=False)
    prompt_format = '{question} Let\'s think step by step and output the final answer after "####".'
    packed = []
    for name, row in file_rows(path, "", "answer", prompt_format=prompt_format):
        answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
        packed.append(pickle.dumps((name, {
            "prompt": row["prompt"], "answer": answer, "source": "gsm8k", "solution": row["answer"]})))
    return Rows(packed)
