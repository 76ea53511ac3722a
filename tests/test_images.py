"""Images in prompts: rows, ids, packed logprobs and gradients, the engine, and what is refused."""
import base64
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from transformers import AutoModelForImageTextToText

import data
import rollout
import runs
from bench import image_families
from config import sampling
from model import load_policy, micro_batches
from options import files, images
from packing import pack
from runtime.model_folder import end_tokens, load_tokenizer
from runs import ROOT, on_ranks
from tasks.examples import examples_of
from tiny import make_squares

SETTINGS = {key: value for key, value in vars(sampling).items() if not key.startswith("__")}
QUESTION = "How many squares are red?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model of tiny/squares with random weights."""
    path = str(tmp_path_factory.mktemp("squares"))
    make_squares.make(path)
    return path


def picture(seed, size=(32, 32)):
    pixels = np.random.default_rng(seed).integers(256, size=(*size, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def row(seeds, text=QUESTION):
    marks = images.MARK * len(seeds)
    return {"prompt": [{"role": "user", "content": marks + text}],
            "images": [images.data_uri(picture(seed)) for seed in seeds]}


def reader_of(folder, trained="trained"):
    tokenizer = load_tokenizer(folder)
    settings = SimpleNamespace(**SETTINGS | {"images": trained})
    return images.load_reader(settings, folder, tokenizer), tokenizer


def rollouts_of(folder, rows, count, trained="trained"):
    """`count` rollouts for each row, of random tokens; and the Reader."""
    reader, tokenizer = reader_of(folder, trained)
    random = np.random.default_rng(0)
    rollouts = []
    for prompt in data.encode_rows(tokenizer, [(f"row {i}", row) for i, row in enumerate(rows)]):
        for _ in range(count):
            tokens = random.integers(97, 120, size=random.integers(2, 9)).tolist()
            rollouts.append(rollout.Rollout.single(prompt.ids, tokens, [0.0] * len(tokens), "stop"))
            rollouts[-1].row = prompt.row
    return rollouts, reader


ROWS = [row([1]), row([2]), row([3, 4], "Which is larger?"), row([], "And none?")]


def expected_of(folder, rollouts, reader, trained):
    """Logprobs by transformers alone, a sequence at a time, and the gradients of the sum of their squares."""
    hf = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if not trained:
        text = {*hf.get_decoder().parameters(), *hf.get_output_embeddings().parameters()}
        for parameter in {*hf.parameters()} - text:
            parameter.requires_grad_(False)
    logps = []
    for r in rollouts:
        ids = torch.from_numpy(np.where(r.ids < 0, reader.place, r.ids)).long()[None]
        pixels = {}
        if r.row["images"]:
            pixels = reader.processor(text=[reader.processor.image_token * len(r.row["images"])], images=[[
                Image.open(io.BytesIO(base64.b64decode(image.partition(",")[2]))) for image in r.row["images"]]],
                return_tensors="pt")
            pixels = {key: pixels[key] for key in ("pixel_values", "pixel_attention_mask") if key in pixels}
        logits = hf(input_ids=ids, use_cache=False, **pixels).logits[0, r.places - 1]
        logps.append(logits.log_softmax(-1).gather(1, ids[0, r.places, None])[:, 0])
    sum((logp ** 2).sum() for logp in logps).backward()
    return [logp.detach() for logp in logps], {name: p.grad for name, p in hf.named_parameters() if p.grad is not None}


def ours(folder, rows, count, trained, shares, token_budget):
    """Of a rank: its logprobs, and of all ranks the gradients, of micro-batches; and how often the tower ran."""
    rollouts, reader = rollouts_of(folder, rows, count, trained)
    size = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size,))
    policy = load_policy(folder, mesh, torch.float32, reader=reader)
    calls = []
    policy.hf.base_model.vision_model.register_forward_hook(lambda *_: calls.append(1))
    logps = {}
    number = 0
    for batch in micro_batches(policy, rollouts, shares[dist.get_rank()], token_budget):
        logp, _ = policy(batch, 1.0)
        batch.put(logp.detach(), logps)
        ((logp ** 2).sum() * size).backward()
        number += 1
    gradients = {name: p.grad.full_tensor() for name, p in policy.hf.named_parameters() if p.grad is not None}
    return logps, gradients, len(calls), number


@pytest.mark.parametrize("trained", ["trained", "frozen"])
@pytest.mark.parametrize("ranks, shares, token_budget", [
    (1, [range(16)], 10_000), (1, [range(16)], 40), (2, [range(8), range(8, 16)], 10_000),
    (2, [range(12), range(12, 16)], 10_000)])
def test_logprobs_and_gradients_are_those_of_transformers(folder, tmp_path, mesh, trained, ranks, shares,
                                                          token_budget):
    """Packed, with two pictures in a prompt and with none, on two ranks also where only one has images."""
    rollouts, reader = rollouts_of(folder, ROWS, 4)
    expected, expected_gradients = expected_of(folder, rollouts, reader, trained == "trained")
    arguments = folder, ROWS, 4, trained, [list(share) for share in shares], token_budget
    results = [ours(*arguments)] if ranks == 1 else on_ranks(ranks, tmp_path, ours, *arguments)
    logps = {}
    for found, gradients, calls, number in results:
        assert calls == number                                  # not one for each prompt or completion
        logps |= found
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in gradients.items():
            gap = (gradient - expected_gradients[name]).abs().max()
            assert gap < 1e-5 * max(g.abs().max() for g in expected_gradients.values()), name
    assert logps.keys() == {*range(16)}
    for s, logp in enumerate(expected):
        torch.testing.assert_close(logps[s], logp, atol=1e-5, rtol=1e-5)


def test_different_pictures_share_no_prefix(folder):
    """One question about two pictures: what stands before them is shared, and within a group all of the prompt."""
    rollouts, reader = rollouts_of(folder, [row([1]), row([2])], 2)
    assert len(rollouts[0].prompt_ids) == len(rollouts[2].prompt_ids)
    own = sum(len(r.logprobs) - 1 for r in rollouts)
    before = np.flatnonzero(rollouts[0].ids < 0)[0]
    (batch,) = pack(rollouts, range(4), 10_000)
    longer = {r.ids[len(r.prompt_ids)] for r in rollouts}
    assert len(longer) == 4                                     # the completions share nothing
    assert batch.input_ids.shape[1] == 2 * len(rollouts[0].prompt_ids) - before + own
    again, _ = rollouts_of(folder, [row([1]), row([2])], 2)
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(rollouts, again))


# ---------------------------------------------------------------- rows

def blocks(*sources):
    return [{"role": "user", "content": [*sources, {"type": "text", "text": QUESTION}]}]


URI = images.data_uri(picture(1))
FORMS = {
    "TRL": {"prompt": blocks({"type": "image"}), "images": [URI]},
    "TRL, in the block": {"prompt": blocks({"type": "image", "image": URI})},
    "OpenAI": {"messages": blocks({"type": "image_url", "image_url": {"url": URI}})},
    "verl": {"prompt": [{"role": "user", "content": f"<image>{QUESTION}"}], "images": [URI]},
    "a path": {"prompt": [{"role": "user", "content": QUESTION}], "image": "one.png"},
    "null of Arrow": {"prompt": [{"role": "user", "content": [
        {"type": "image", "text": None}, {"type": "text", "text": QUESTION}]}], "images": [URI], "image": None}}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_row_shows_the_same(folder, tmp_path, form):
    """A path has ids of its own below 0, because they are made of it."""
    (tmp_path / "one.png").write_bytes(picture(1))
    (tmp_path / "rows.jsonl").write_text(json.dumps(FORMS[form] | {"answer": "1"}))
    [named] = files.file_rows(str(tmp_path / "rows.jsonl"), images=True)
    reader, tokenizer = reader_of(folder)
    [prompt] = data.encode_rows(tokenizer, [named])
    [expected] = data.encode_rows(tokenizer, [("row", row([1]))])
    assert prompt.ids == expected.ids or form == "a path"
    assert tokenizer.decode(prompt.ids) == tokenizer.decode(expected.ids) and min(prompt.ids) < 0
    read, shown = (reader.pixels(x.row["images"])["pixel_values"] for x in (prompt, expected))
    assert torch.equal(read, shown)


def test_a_parquet_file_of_the_hub(folder, tmp_path):
    import pyarrow
    import pyarrow.parquet
    table = pyarrow.table({"image": [{"bytes": picture(1), "path": "1.png"}], "question": [QUESTION], "label": ["1"]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    [named] = files.file_rows(str(tmp_path / "rows.parquet"), "question", "label", images=True)
    _, tokenizer = reader_of(folder)
    [prompt] = data.encode_rows(tokenizer, [named])
    [expected] = data.encode_rows(tokenizer, [("row", row([1]))])
    assert prompt.ids == expected.ids and named[1]["answer"] == "1"


# Rows in the form in which others publish theirs, with one picture: the file, settings, the prompt and the answer.
IMAGE = {"bytes": picture(1), "path": "1.png"}
PUBLISHED = {
    "hiyouga/geometry3k": (
        {"images": [IMAGE], "problem": f"<image>{QUESTION}", "answer": "1"}, {"prompt_column": "problem"}),
    "BUAADreamer/clevr_count_70k": (
        {"image": IMAGE, "problem": QUESTION, "solution": "<answer> 1 </answer>"}, {"prompt_column": "problem"}),
    "AI4Math/MathVista": (
        {"pid": "1", "question": "?", "image": "images/1.jpg", "decoded_image": IMAGE, "choices": None, "unit": None,
         "answer": "1", "query": QUESTION, "metadata": {"grade": "high school"}}, {"prompt_column": "query"}),
    "ScreenSpot": (
        {"file_name": "1.png", "bbox": [0.1, 0.2, 0.3, 0.4], "instruction": QUESTION, "data_type": "icon", "image": IMAGE,
         "answer": "1"}, {"prompt_column": "instruction"}),
    "TRL": ({"prompt": [{"role": "user", "content": [
        {"type": "image", "text": None}, {"type": "text", "text": QUESTION}]}], "images": [IMAGE], "solution": "1"}, {}),
    "verl": ({"data_source": "geo3k", "prompt": [{"role": "user", "content": f"<image>{QUESTION}"}], "images": [IMAGE],
              "ability": "math", "reward_model": {"ground_truth": "1", "style": "rule"},
              "extra_info": {"answer": "1", "index": 0, "question": QUESTION, "split": "train"}}, {})}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_rows_begin_at_the_first_try(folder, tmp_path, name):
    import pyarrow
    import pyarrow.parquet
    row_of_file, settings = PUBLISHED[name]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row_of_file]), tmp_path / "rows.parquet")
    [named] = files.file_rows(str(tmp_path / "rows.parquet"), images=True, **settings)
    _, tokenizer = reader_of(folder)
    [prompt] = data.encode_rows(tokenizer, [named])
    [expected] = data.encode_rows(tokenizer, [("row", row([1]))])
    assert prompt.ids == expected.ids and named[1]["images"] == row([1])["images"]
    assert "1" in named[1]["answer"]


def test_a_picture_is_turned_as_its_camera_says(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6                                            # a quarter turn
    Image.open(io.BytesIO(picture(1, (32, 16)))).save(tmp_path / "turned.png", exif=exif)
    assert images.picture_of(str(tmp_path / "turned.png")).size == (32, 16)


def test_rows_of_the_hub_read_no_files(tmp_path):
    (tmp_path / "one.png").write_bytes(picture(1))
    assert images.as_text("one.png", str(tmp_path)) == f"{tmp_path}/one.png"
    with pytest.raises(ValueError, match="no such image: .*one.png"):
        images.as_text(f"{tmp_path}/one.png", "hf://datasets/someone/something")


@pytest.mark.parametrize("row, message", [
    ({"prompt": blocks({"type": "image"}), "images": ["none.png"]}, "no such image: .*none.png"),
    ({"prompt": blocks({"type": "image"}), "images": ["https://x.org/a.png"]}, "none is fetched"),
    ({"prompt": blocks({"type": "image", "image": URI}), "images": [URI]}, "two images for a place"),
    ({"prompt": blocks({"type": "image"}), "images": [URI, URI]}, "2 images for 1 places"),
    ({"prompt": blocks(), "images": []}, None),
    ({"prompt": [{"role": "user", "content": "<image>?"}]}, "0 images for 1 places"),
    ({"prompt": [{"role": "system", "content": "Look."}], "images": [URI]}, "no message of the user can show its images"),
    ({"prompt": blocks({"type": "image"}), "images": [7]}, "a path, a data URI or bytes, not 7"),
    ({"prompt": blocks({"type": "image"}), "images": ["text.png"]}, "cannot identify image file"),
    ({"prompt": f"<image>{QUESTION}", "images": [URI]}, "has to be a list of messages")])
def test_wrong_rows_are_named(tmp_path, row, message):
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "rows.jsonl").write_text("\n" + json.dumps(row | {"answer": "1"}))
    if message:
        with pytest.raises(ValueError, match=f"rows.jsonl:2: .*{message}"):
            files.file_rows(str(tmp_path / "rows.jsonl"), images=True)
    else:
        [(_, read)] = files.file_rows(str(tmp_path / "rows.jsonl"), images=True)
        assert read["images"] == []


def test_a_worked_answer_sees_the_images_before_it(folder, tmp_path):
    """Each turn of a conversation has the images up to it; a prompt that ends in an answer's beginning has its own."""
    user, assistant = ({"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "3"})
    second = images.data_uri(picture(2))
    rows = [{"messages": [user, assistant, user, assistant], "images": [URI, second]},
            {"prompt": [user, assistant], "images": [URI], "answer": "4"}]
    reader, tokenizer = reader_of(folder)
    settings = SimpleNamespace(**SETTINGS | {"environment": "", "tools": "", "prompt_column": "", "answer_column": ""})
    sampler = SimpleNamespace(settings=settings, tokenizer=tokenizer, eos_ids=end_tokens(folder, tokenizer), tools=None)
    turns = []
    for i, row in enumerate(rows):
        (tmp_path / f"{i}.jsonl").write_text(json.dumps(row))
        [(_, read)] = files.file_rows(str(tmp_path / f"{i}.jsonl"), images=True)
        turns += examples_of(read, sampler)
    assert [turn.row["images"] for turn in turns] == [[URI], [URI, second], [URI]]
    for turn in turns:
        pixels = reader.pixels(turn.row["images"])
        assert (turn.ids < 0).sum() == 16 * len(turn.row["images"]) and len(pixels["pixel_values"]) > 0
    assert [batch.shown[1].tolist() for batch in attached(reader, turns)] == [[*range(16)], [*range(32)], [*range(16)]]


def attached(reader, rollouts):
    """The MicroBatches of these rollouts, one for each."""
    for s in range(len(rollouts)):
        (batch,) = pack(rollouts, [s], 10_000)
        reader.attach(batch, rollouts, None)
        yield batch


@pytest.mark.parametrize("settings, message", [
    ({"chat": False}, "images=frozen: not together with chat=false"), ({"agent": "x.py:f"}, "not together with an agent"),
    ({"critic_model": ""}, "not together with a critic"), ({"sequence_parallel_size": 2}, "not together with sequence_parallel_size"),
    ({"images": "trained", "lora_rank": 8}, "images=trained: not together with lora_rank")])
def test_what_does_not_go_with_images(folder, settings, message):
    settings = SimpleNamespace(**SETTINGS | {"images": "frozen"} | settings)
    with pytest.raises(ValueError, match=message):
        images.load_reader(settings, folder, load_tokenizer(folder))


def test_models_and_engines_that_read_none():
    with pytest.raises(ValueError, match="images: model=.*tiny/algebra reads none"):
        reader_of(f"{ROOT}/tiny/algebra")
    with pytest.raises(ValueError, match="images need engine=vllm: engine=hf reads none"):
        images.seeing(rollout.engine_class("hf"))
    tokenizer = load_tokenizer(f"{ROOT}/tiny/algebra")
    with pytest.raises(ValueError, match="row: it shows images, for which --images=frozen or --images=trained"):
        data.encode_rows(tokenizer, [("row", row([1]))])


# ---------------------------------------------------------------- a model that cannot be packed

def test_a_tower_that_sees_only_earlier_patches_is_refused(folder, mesh, monkeypatch):
    """As under the attention "packed", which would be causal inside an image."""
    reader, _ = reader_of(folder)
    monkeypatch.setattr(images, "check_same", lambda label, network, P: (
        network.hf.set_attn_implementation("packed"), True)[1])
    with pytest.raises(ValueError, match="with an image it differs from what transformers computes by"):
        load_policy(folder, mesh, torch.float32, reader=reader)


@pytest.mark.parametrize("family, message", [
    ("gemma3", "with an image it differs from what transformers computes by"),      # its images attend both ways
    ("llava", "does not run here with images: TypeError"),                          # under FSDP
    ("llava_next", "does not run here with images: ValueError"),                    # two prompts in a micro-batch
    ("paligemma", "does not run here with images: ValueError")])
def test_families_that_would_be_trained_wrongly_are_refused(tmp_path, mesh, family, message):
    image_families.make(family, str(tmp_path))
    reader, _ = reader_of(str(tmp_path))
    with pytest.raises(ValueError, match=message):
        load_policy(str(tmp_path), mesh, torch.float32, reader=reader)


def test_a_model_without_a_token_for_an_image(folder, monkeypatch):
    monkeypatch.setattr(images, "read_config", lambda path: SimpleNamespace())
    with pytest.raises(ValueError, match="images: model=.* has no token that stands for an image"):
        reader_of(folder)


# ---------------------------------------------------------------- the engine

@pytest.fixture(scope="module")
def engine(folder):
    pytest.importorskip("vllm")
    kind = images.seeing(rollout.engine_class("vllm"))
    engine = kind(folder, torch.float32, 128, end_tokens(folder, load_tokenizer(folder)), 0.4)
    engine.dtype = torch.float32
    yield engine
    runs.shut_down(engine)


def sampled(engine, folder, rows, count=4, seed=0):
    """Rollouts of an engine, with their rows."""
    _, tokenizer = reader_of(folder)
    prompts = data.encode_rows(tokenizer, [(f"row {i}", row) for i, row in enumerate(rows)])
    requests = [rollout.Request(None, prompt.ids, seed + i, 12, shown=prompt.shown) for prompt in prompts for i in range(count)]
    rollouts = engine.generate(requests)
    for i, r in enumerate(rollouts):
        r.row = prompts[i // count].row
    return rollouts


def gap_of(policy, rollouts):
    gaps = []
    for batch in micro_batches(policy, rollouts, range(len(rollouts)), 10_000):
        logps = {}
        with torch.no_grad():
            batch.put(policy(batch, 1.0)[0], logps)
        gaps += [np.abs(logp.numpy() - rollouts[s].logprobs).max() for s, logp in logps.items()]
    policy.reshard()
    return max(gaps)


@pytest.mark.parametrize("trained", ["frozen", "trained"])
def test_engine_and_trainer_see_the_same(engine, folder, mesh, trained):
    """Before and after syncs of the text part and of all; a picture that the engine knows is seen anew."""
    reader, _ = reader_of(folder, trained)
    policy = load_policy(folder, mesh, torch.float32, reader=reader)
    engine.update_weights(policy, 0)
    assert gap_of(policy, sampled(engine, folder, ROWS)) < 2e-5
    with torch.no_grad():
        for name, parameter in policy.hf.named_parameters():
            if parameter in policy.text_parameters():
                parameter.mul_(1.1)
    engine.update_weights(policy, 1)
    assert gap_of(policy, sampled(engine, folder, ROWS)) < 2e-5


def test_a_placeholder_that_was_sampled_is_a_token(engine, folder, mesh):
    """A later turn goes on after an earlier one in which the policy has sampled placeholders."""
    reader, tokenizer = reader_of(folder)
    policy = load_policy(folder, mesh, torch.float32, reader=reader)
    engine.update_weights(policy, 0)                            # also those that see, which a test may have changed
    [prompt] = data.encode_rows(tokenizer, [("row", row([1]))])
    ids = prompt.ids + [100, reader.place, 101, reader.place]
    rollouts = engine.generate([rollout.Request(None, ids, seed, 8, shown=prompt.shown) for seed in range(4)])
    for r in rollouts:
        r.row = prompt.row
    assert gap_of(policy, rollouts) < 2e-5


def test_ids_that_are_expanded_already_stop_the_run(engine, folder):
    """vLLM would expand them again."""
    reader, tokenizer = reader_of(folder)
    [prompt] = data.encode_rows(tokenizer, [("row", row([1]))])
    wrong = prompt.shown._replace(ids=np.where(np.less(prompt.ids, 0), reader.place, prompt.ids).tolist())
    with pytest.raises(RuntimeError, match="vLLM and the trainer read other tokens of a prompt with images"):
        engine.generate([rollout.Request(None, prompt.ids, 0, 4, shown=wrong)])
    engine.llm.llm_engine.abort_request([*engine.llm.llm_engine.output_processor.request_states])
    engine.versions.clear()


# ---------------------------------------------------------------- whole runs, with the model that is shipped

SMALL = {"prompts_per_step": 2, "num_generations": 4, "train_prompts": 64, "eval_prompts": 4, "eval_samples": 1,
         "max_steps": 2, "warmup_steps": 0}


def train(script, out_dir, ranks=1, **settings):
    arguments = [f"--{key}={value}" for key, value in (SMALL | settings).items()]
    return runs.train(script, out_dir, ["config/tasks/squares.py", *arguments], {}, ranks=ranks)


def without_times(lines):
    return [{key: value for key, value in line.items() if not key.startswith(("timing_s", "perf"))} for line in lines]


@pytest.mark.parametrize("images", ["trained", "frozen"])
def test_a_run_and_its_resume(tmp_path, images):
    """A resumed run is an unbroken one; its checkpoint has the processor; only what is trained has changed."""
    whole, said = train("train_grpo.py", tmp_path / "whole", images=images, max_steps=4, save_interval=2)
    assert "<global-img><image><image>" in said
    later, _ = train("train_grpo.py", tmp_path / "later", images=images, max_steps=4,
                     resume=tmp_path / "whole" / "checkpoint-2")
    assert without_times(later) == without_times(whole)[2:]
    samples = [json.loads(line) for line in (tmp_path / "whole/samples.jsonl").read_text().splitlines()]
    assert samples[0]["images"][0].startswith("data:image") and "<image>" in samples[0]["prompt"][0]["content"]
    saved = tmp_path / "whole" / "checkpoint-4"
    assert (saved / "processor_config.json").exists()
    before, after = (AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
                     for path in (f"{ROOT}/tiny/squares", saved))
    same = [torch.equal(a, b) for a, b in zip(before.model.vision_model.parameters(), after.model.vision_model.parameters())]
    assert all(same) if images == "frozen" else not any(same)
    assert not torch.equal(before.get_output_embeddings().weight, after.get_output_embeddings().weight)


AGAIN = """
class Again:
    def reset(self, answer, **row):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        return "No. <image> Again?", float(self.turns), self.turns == 3
"""


def test_an_episode_about_an_image(tmp_path):
    """All turns see the picture, and a placeholder in a reply is a token like any other."""
    (tmp_path / "again.py").write_text(AGAIN)
    lines, _ = train("train_grpo.py", tmp_path / "run", environment=tmp_path / "again.py:Again", max_completion_length=90)
    assert lines[0]["reward"] == 6 and lines[0]["sampling/sampling_logp_difference/mean"] < 2e-5
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    assert [message["role"] for message in samples[0]["completion"]] == ["assistant", "user"] * 2 + ["assistant"]


def test_an_environment_that_returns_an_image_is_refused(tmp_path):
    block = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}'
    (tmp_path / "again.py").write_text(AGAIN.replace('"No. <image> Again?"', f'[{{"role": "user", "content": [{block}]}}]'))
    runs.refused(["config/tasks/squares.py", f"--environment={tmp_path}/again.py:Again", "--max_completion_length=90"],
                 "in turn 1: step returned ([{'role': 'user', 'content': [{'type': 'image_url'", tmp_path, loads=True)


def test_other_scripts_and_settings(tmp_path):
    """Worked answers, adapters, a KL, evaluations of their own, and engines apart."""
    worked = SMALL | {"reward": "none", "prompts_per_step": 4}
    del worked["num_generations"]
    arguments = [f"--{key}={value}" for key, value in worked.items()]
    worked, _ = runs.train("train_sft.py", tmp_path / "sft", ["config/tasks/squares.py", *arguments], {})
    assert 0 < worked[0]["token_loss"] < 2 and worked[0]["grad_norm"] > 0
    adapted, _ = train("train_grpo.py", tmp_path / "lora", images="frozen", lora_rank=4, kl_coef=0.01)
    assert adapted[0]["grad_norm"] > 0 and adapted[0]["kl"] == pytest.approx(0, abs=1e-4)
    apart, _ = train("train_async.py", tmp_path / "async", ranks=2)
    plain, _ = train("train_grpo.py", tmp_path / "plain", engine_correction="token_truncate")
    assert apart[0]["reward"] == plain[0]["reward"] and apart[0]["loss"] == plain[0]["loss"]
    two, _ = train("train_grpo.py", tmp_path / "two", ranks=2, engine_correction="token_truncate")
    assert two[0]["loss"] == pytest.approx(plain[0]["loss"], abs=1e-5)
    output = runs.forked(tmp_path / "log", "evaluate_model.py", "--model=tiny_squares", "--task=squares",
                         "--images=frozen", "--max_completion_length=4", "--eval_prompts=4", "--samples=2")
    assert "mean@2" in output
