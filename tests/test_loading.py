"""From a folder to a network: families of models, against transformers' own forwards, and what is refused."""
import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.distributed.tensor import DTensor
from transformers import (AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer,
                          GenerationConfig)
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

import attention
from data import encode_rows
from bench.models import FAMILIES, make
from runtime.checkpoint import load_optimizer, save_checkpoint
from model import Policy, load_policy, token_logprobs
from options.critic import load_critic, token_values
from packing import pack
from rollout import load_engine
from runtime.model_folder import check_model, check_trainable, load_tokenizer, model_class
from runs import ROOT, train
from test_packing import episode, random_parts, sampled_places
from weights import engine_weights


STATE = {"eval_scores": {}}


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A function that makes a folder with a small model of a family."""
    made = {}

    def folder(name):
        if name not in made:
            made[name] = str(tmp_path_factory.mktemp(name))
            make(name, made[name])
        return made[name]
    return folder


with open(os.path.join(ROOT, "docs/measured/models.md")) as file:
    PAGE = " ".join(file.read().split())


# The page is about transformers 5.19. Older versions refuse zamba2's config, and llama4 in other words. To be
# removed once requirements.txt asks for 5.19.
OLDER = {"zamba2", "llama4"} if transformers.__version__ < "5.19" else set()


@pytest.mark.parametrize("name", [name for group in FAMILIES.values() for name in group if name not in OLDER])
def test_a_family_is_loaded_as_its_page_says(family, mesh, name):
    """Packed, a sequence per line, or refused in this sentence. Without figures the page says less."""
    row = PAGE.partition(f"| `{name}` |")[2].partition("| |")[0]
    try:
        packed = load_policy(check_trainable(family(name)), mesh, torch.float32).packed
    except Exception as error:
        # An error of transformers' own has our sentence as a note.
        sentence = getattr(error, "__notes__", [])
        said = ": ".join([*sentence, *[type(error).__name__] * len(sentence), str(error)])
        # Figures depend on the machine.
        assert said.replace(family(name), name).partition(" by 0")[0] in PAGE and "refused" in row
    else:
        assert f"model={name}:" not in PAGE
        assert packed == ("a sequence per line" not in row) or "e-" not in row


def test_the_guide_sorts_the_families_as_the_tables_do():
    """In docs/models.md each is in the column of the engines that it ran with, with a star for a sequence per line."""
    with open(os.path.join(ROOT, "docs/models.md")) as file:
        rows = [line.split("|")[1:-1] for line in file if line.startswith("|")]
    for name in (name for group in FAMILIES.values() for name in group):
        vllm, plain = PAGE.partition(f"| `{name}` |")[2].split(" |")[:2]
        ran = [" stopped" not in cell and " refused" not in cell for cell in (vllm, plain)]
        column = 1 if ran[0] else 2 if ran[1] else 3
        [(place, cell)] = [(i, cell) for row in rows for i, cell in enumerate(row) if f"`{name}`" in cell]
        assert place == column, name
        assert (f"`{name}`\\*" in cell) == ("a sequence per line" in vllm + plain), name


def plain_logps(hf, parts):
    """Logprobs of the sampled tokens of one row by transformers alone, with gradient."""
    ids, places = torch.tensor(sum(parts, [])), sampled_places(parts)
    logits = hf(input_ids=ids[None], use_cache=False).logits[0, [place - 1 for place in places]]
    table = logits.log_softmax(-1)
    return table.gather(1, ids[places, None])[:, 0]


# They bring windows of 8 tokens, softcapped scores and logits, scaled logits, sinks, dropout, a mixture of
# experts, states that pass from token to token, and parts for images.
@pytest.mark.parametrize("name, packed", [
    ("gemma3_text", True), ("gemma2", True), ("granite", True), ("gpt_oss", True), ("gpt2", True),
    ("opt", True), ("qwen3_moe", True), ("qwen3_5_text", False), ("falcon_h1", False), ("lfm2", False),
    ("gemma3", True), ("qwen2_5_vl", True), ("cohere", True)])
def test_logprobs_and_gradients_of_a_family_are_those_of_transformers(family, mesh, name, packed):
    lists = random_parts(8, 256, longest=14, parts=(2, 4))
    rollouts, path = [episode(*parts) for parts in lists], family(name)
    plain = model_class(AutoConfig.from_pretrained(path)).from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager").eval()
    policy = load_policy(path, mesh, torch.float32, name in ("gpt2", "opt", "qwen3_5_text"))
    assert policy.packed == packed
    expected = [plain_logps(plain, parts) for parts in lists]
    torch.cat(expected).sum().backward()
    for s, logp in token_logprobs(policy, rollouts, range(8), 100, 1.0).items():
        torch.testing.assert_close(logp, expected[s].detach(), atol=1e-4, rtol=1e-4)
    theirs = dict(plain.named_parameters())
    for batch in pack(rollouts, range(8), 100, policy.packed):
        policy(batch, 1.0)[0].sum().backward()
    for key, parameter in policy.hf.named_parameters():
        if parameter.grad is None:
            # What reads images is frozen.
            assert not parameter.requires_grad and theirs[key].grad is None
        else:
            gap = (parameter.grad.full_tensor() - theirs[key].grad).norm()
            assert gap < 1e-4 * max(theirs[key].grad.norm(), 1e-3), (key, gap)


@pytest.mark.parametrize("name", ["qwen3", "olmo2", "gemma3", "granite", "gpt_neox", "cohere", "ernie4_5_moe",
                                  "qwen3_next", "qwen2_5_vl"])
def test_any_family_makes_a_critic(family, mesh, tmp_path, name):
    """It starts at zero, reads what its body says at the token before, and comes back from its own folder."""
    lists = random_parts(5, 256, longest=9)
    rollouts, path = [episode(*parts) for parts in lists], family(name)
    plain = model_class(AutoConfig.from_pretrained(path)).from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager").eval()
    critic = load_critic(path, mesh, torch.float32)
    assert not torch.cat(list(token_values(critic, rollouts, range(5), 100).values())).any()
    head = torch.linspace(-1, 1, critic.hf.score.in_features)
    with torch.no_grad():
        critic.hf.score.weight.to_local().copy_(head[None])
        critic.hf.score.bias.to_local().fill_(0.5)
    values = token_values(critic, rollouts, range(5), 100)
    for s, parts in enumerate(lists):
        with torch.no_grad():
            hidden = Policy(plain).decoder(input_ids=torch.tensor([sum(parts, [])]), use_cache=False)
        expected = hidden.last_hidden_state[0, [place - 1 for place in sampled_places(parts)]] @ head + 0.5
        torch.testing.assert_close(values[s], expected, atol=1e-4, rtol=1e-4)
    optimizer = torch.optim.AdamW(critic.parameters())
    saved = str(tmp_path / "checkpoint-1")
    save_checkpoint(saved, {"critic": (critic, optimizer)}, load_tokenizer(path), STATE, 1)
    again = token_values(load_critic(f"{saved}/critic", mesh, torch.float32), rollouts, range(5), 100)
    assert all(torch.equal(values[s], again[s]) for s in values)
    if name == "qwen3":                                         # a family that transformers has a class for
        theirs = AutoModelForTokenClassification.from_pretrained(f"{saved}/critic").eval()
        found = theirs(torch.tensor([sum(lists[0], [])])).logits[0, :, 0].detach()
        places = [place - 1 for place in sampled_places(lists[0])]
        torch.testing.assert_close(values[0], found[places], atol=1e-4, rtol=1e-4)


def test_parameters_without_a_gradient_do_not_keep_a_run_from_resuming(family, mesh, tmp_path):
    """A router's correction bias has none."""
    (batch,) = pack([episode([5, 6], [7, 8])], [0], 10)
    path, folder = family("ernie4_5_moe"), str(tmp_path / "checkpoint-1")
    for start in (path, folder):
        policy = load_policy(start, mesh, torch.float32)
        optimizer = torch.optim.AdamW(policy.parameters(), 0.01)
        if start == folder:
            load_optimizer(folder, policy, optimizer)
        policy(batch, 1.0)[0].sum().backward()
        optimizer.step()
        if start == path:
            save_checkpoint(folder, {"": (policy, optimizer)}, load_tokenizer(path), STATE, 1)
    used = [p for p in policy.parameters() if p.grad is not None]
    assert len(used) < len(list(policy.parameters()))
    assert {optimizer.state[p]["step"].item() for p in used} == {2}


# Of a config of the second, transformers also makes a model that sees no images.
@pytest.mark.parametrize("name, kind", [("gemma3", "Gemma3ForConditionalGeneration"),
                                        ("qwen3_5", "Qwen3_5ForConditionalGeneration")])
def test_a_checkpoint_of_a_model_that_sees_images_is_whole(family, mesh, tmp_path, name, kind):
    """What reads images is in it, unchanged, and it is the same kind of folder."""
    path = family(name)
    policy = load_policy(path, mesh, torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), 0.1)
    (batch,) = pack([episode([5, 6], [7, 8])], [0], 10)
    policy(batch, 1.0)[0].sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    folder = str(tmp_path / "checkpoint-1")
    save_checkpoint(folder, {"": (policy, optimizer)}, load_tokenizer(path), STATE, 1)
    before, after = (load_file(f"{one}/model.safetensors") for one in (path, folder))
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    images = {key for key in before if "vision" in key or "visual" in key or "projector" in key}
    assert changed and images and not changed & images
    assert AutoConfig.from_pretrained(folder).architectures == [kind]
    sent = {name for name, _ in engine_weights(policy, "checkpoint", torch.float32)}
    assert sent and not sent & images
    again = load_policy(folder, mesh, torch.float32)
    other = torch.optim.AdamW(again.parameters(), 0.1)
    load_optimizer(folder, again, other)
    for network, its in ((policy, optimizer), (again, other)):
        network(batch, 1.0)[0].sum().backward()
        its.step()
    for ours, theirs in zip(policy.parameters(), again.parameters()):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor())


def test_a_checkpoint_keeps_the_files_of_a_processor(family, mesh, tmp_path):
    """Also where the checkpoint that a run resumed from, and read them from, has been removed."""
    path, tokenizer = shutil.copytree(family("gemma3"), tmp_path / "model"), load_tokenizer(family("gemma3"))
    files = {"preprocessor_config.json": b'{"image_processor_type": "Gemma3ImageProcessor"}',
             "processor_config.json": b'{"processor_class": "Gemma3Processor", "image_seq_length": 4}'}
    for name, content in files.items():
        (path / name).write_bytes(content)
    for step in (1, 2):
        policy, path = load_policy(str(path), mesh, torch.float32), tmp_path / f"checkpoint-{step}"
        shutil.rmtree(policy.hf.name_or_path)
        save_checkpoint(str(path), {"": (policy, None)}, tokenizer, STATE, 2)
        assert {name: (path / name).read_bytes() for name in files} == files
        assert not (path / "video_preprocessor_config.json").exists()


def test_layers_and_what_reads_images_are_units_of_their_own(family, mesh):
    """After a forward only the embedding, which is the head as well, and the last norm are still whole."""
    policy = load_policy(family("gemma3"), mesh, torch.float32)
    (batch,) = pack([episode([5, 6], [7, 8])], [0], 10)
    with torch.no_grad():
        policy(batch, 1.0)
    whole = {name for name, p in policy.hf.named_parameters() if not isinstance(p, DTensor)}
    assert whole == {f"model.language_model.{name}.weight" for name in ("embed_tokens", "norm")}


# A tied head, fused experts, parts for images, and parameters that transformers joins or splits.
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gemma3", "gpt2", "qwen2_5_vl", "qwen3_next"])
def test_weights_in_several_files_are_those_of_save_pretrained(family, mesh, tmp_path, monkeypatch, name):
    monkeypatch.setattr("runtime.model_folder.FILE_SIZE", 100_000)
    path, folder = family(name), str(tmp_path / "checkpoint-1")
    policy = load_policy(path, mesh, torch.float32)
    networks = {"": (policy, torch.optim.AdamW(policy.parameters()))}
    save_checkpoint(folder, networks, load_tokenizer(path), STATE, 1)
    kind = model_class(AutoConfig.from_pretrained(path))
    plain = kind.from_pretrained(path, dtype=torch.float32)
    plain.save_pretrained(tmp_path / "plain", max_shard_size=100_000)
    indices, tensors = [], []
    for place in (folder, tmp_path / "plain"):
        with open(f"{place}/model.safetensors.index.json") as file:
            indices.append(json.load(file))
        files = {file: load_file(f"{place}/{file}") for file in set(indices[-1]["weight_map"].values())}
        assert files.keys() == {file for file in os.listdir(place) if "safetensors" in file} - {
            "model.safetensors.index.json"}
        tensors.append({key: files[file][key] for key, file in indices[-1]["weight_map"].items()})
        for file, held in files.items():
            assert len(held) == 1 or sum(x.nbytes for x in held.values()) <= 100_000
    assert len(files) > 2 and indices[0]["metadata"] == indices[1]["metadata"]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(x, tensors[1][key]) for key, x in tensors[0].items())
    _, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for ours, theirs in zip(load_policy(folder, mesh, torch.float32).parameters(), policy.parameters()):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor())


@pytest.mark.parametrize("generation", [{"temperature": 0.6, "top_p": 0.95}, {"do_sample": True, "top_k": 7},
                                        {}, None])
def test_a_checkpoint_decodes_like_its_base(folder, mesh, tmp_path, generation):
    """Also if the base names a temperature but does not sample, which GenerationConfig refuses to save."""
    path, saved = shutil.copytree(folder, tmp_path / "model"), str(tmp_path / "checkpoint-1")
    os.remove(path / "generation_config.json")
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation | {"max_new_tokens": 9}))
    policy = load_policy(str(path), mesh, torch.float32)
    networks = {"": (policy, torch.optim.AdamW(policy.parameters()))}
    save_checkpoint(saved, networks, load_tokenizer(folder), STATE, 1)
    after = GenerationConfig.from_pretrained(saved)
    assert all(getattr(after, key) == value for key, value in (generation or {}).items())
    texts = []
    for one in (path, saved):
        hf = AutoModelForCausalLM.from_pretrained(one).eval()
        torch.manual_seed(0)
        texts.append([hf.generate(torch.tensor([[5, 6, 7]]), max_length=20).tolist() for _ in range(8)])
    assert texts[0] == texts[1]


def test_a_model_that_sees_other_sequences_is_found_even_where_it_is_no_family(folder, mesh, monkeypatch):
    """A layer that mixes neighbours gets rows of their own; what differs even so is refused."""
    def sees(far):
        def forward(self, x):
            return plain(self, x + 0.1 * torch.nn.functional.pad(x, (0, 0, far, -far)))
        return forward
    plain = Qwen3MLP.forward
    monkeypatch.setattr(Qwen3MLP, "forward", sees(1))
    assert not load_policy(folder, mesh, torch.float32).packed
    noise = lambda self, x: plain(self, x + 0.1 * torch.randn_like(x))
    monkeypatch.setattr(Qwen3MLP, "forward", noise)
    with pytest.raises(ValueError, match="differs from what transformers computes by 0"):
        load_policy(folder, mesh, torch.float32)


def test_loading_notices_that_a_shared_beginning_is_read_wrongly(folder, mesh, monkeypatch):
    monkeypatch.setattr(attention, "Pick", SimpleNamespace(apply=lambda x, places: x[places.flip(0)]))
    assert not load_policy(folder, mesh, torch.float32).packed


@pytest.mark.parametrize("name, packed", [("smollm3", True), ("falcon_h1", False)])
def test_vllm_and_the_trainer_agree_after_a_sync(family, reward_file, tmp_path, name, packed):
    """On a model that vLLM runs by transformers' own class, and on one whose layers have a state."""
    vllm = pytest.importorskip("vllm")
    if torch.cuda.is_available():
        pytest.skip("vLLM's CPU build")
    if name == "falcon_h1" and vllm.__version__.startswith("0.25."):
        pytest.skip("the CPU build of vLLM 0.25 has no kernels for such layers")
    settings = {"model": family(name), "engine": "vllm", "max_steps": 2, "warmup_steps": 0,
                "max_prompt_length": 48, "max_completion_length": 16, "prompts_per_step": 4,
                "num_generations": 4, "train_prompts": 64, "eval_prompts": 4, "learning_rate": 1e-3}
    metrics, output = train("train_grpo.py", tmp_path / "run", [reward_file], settings)
    assert 0 < metrics[1]["sampling/sampling_logp_difference/mean"] < 1e-4
    assert packed == ("a line of its own" not in output)


# ---------------------------------------------------------------- what cannot be trained is refused

def changed(folder, path, **changes):
    """A copy of a model folder with a changed config."""
    shutil.copytree(folder, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return str(path)


@pytest.mark.parametrize("changes, message", [
    ({"quantization_config": {"quant_method": "awq", "bits": 4}}, r"its weights are quantised \(awq\); training needs plain "
     "ones, and docs/measured/folders.md says how to write them"),
    ({"quantization_config": {"quant_method": "fp8"}}, r"its weights are quantised \(fp8\)"),
    ({"auto_map": {"AutoConfig": "a.B"}, "model_type": "mine"}, "cannot be read: ValueError: .*custom code"),
    ({"model_type": "mine"}, "config.json cannot be read: .*`mine`"),
    ({"model_type": "t5"}, "a t5 model is not a decoder that generates text"),
    ({"model_type": "vit"}, "a vit model is not a decoder that generates text"),
    ({"model_type": "llama4_text", "attention_chunk_size": 10}, "the model takes 10$"),
    ({"original_max_position_embeddings": 10, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, "the model takes 10$"),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0,
                          "original_max_position_embeddings": 10}}, "the model takes 10$")])
def test_what_a_config_tells_is_refused_before_anything_is_loaded(folder, tmp_path, changes, message):
    path = changed(folder, tmp_path / "model", **changes)
    with pytest.raises(ValueError, match=f"^critic_model=.*{message}"):
        check_trainable(path, "critic_model", length=11)


def test_code_that_a_folder_brings_for_a_known_model_is_not_needed(folder, tmp_path):
    check_trainable(changed(folder, tmp_path / "model", auto_map={"AutoConfig": "a.B"}))


def test_a_prompt_with_a_token_that_the_model_does_not_embed_is_refused(folder, tmp_path):
    tokenizer = load_tokenizer(changed(folder, tmp_path / "model", vocab_size=200))
    assert max(tokenizer("1+1").input_ids) < 200 <= max(tokenizer("\u20ac").input_ids)
    rows = [("here:1", {"prompt": "1+1"}), ("here:2", {"prompt": "\u20ac"})]
    with pytest.raises(ValueError, match="^here:2: .* a token that the model does not have"):
        encode_rows(tokenizer, rows)


@pytest.mark.parametrize("kind, name", [("qwen3", "LlamaTokenizerFast"), ("llama", "LlamaTokenizerFast"),
                                        ("llama", "GPT2Tokenizer"), ("qwen2", "PreTrainedTokenizerFast")])
def test_a_text_is_cut_into_tokens_as_tokenizer_json_says(folder, tmp_path, kind, name):
    """transformers 5 has classes that take the words of tokenizer.json, and cut a text in their own way."""
    digits = Regex(r"\p{N}{1,3}|[^\r\n\p{L}\p{N}]?\p{L}+|\s+|[^\s\p{L}\p{N}]+")
    written = Tokenizer(models.BPE())
    written.normalizer = normalizers.NFC()
    written.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(digits, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    written.decoder = decoders.ByteLevel()
    written.train_from_iterator(["What is 1234 + 56? It is 1290, and 1234 is more.\n\n"] * 9, trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "</s>"]))
    path = changed(folder, tmp_path / "model", model_type=kind, vocab_size=340)
    written.save(f"{path}/tokenizer.json")
    with open(f"{path}/tokenizer_config.json", "w") as file:
        json.dump({"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>"}, file)
    text = "What is 1234 + 56?\n\n  It is 1290."
    tokenizer = load_tokenizer(path)
    tokenizer.save_pretrained(tmp_path / "saved")
    # A checkpoint keeps what the file says, also for those who read it with AutoTokenizer.
    for tokenizer in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "saved")):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert ids == written.encode(text, add_special_tokens=False).ids and tokenizer.decode(ids) == text
        assert tokenizer.eos_token_id == 1


def test_a_space_follows_a_special_token_if_tokenizer_json_says_so(folder, tmp_path):
    """As in Llama 2's file, which the class of transformers 5 reads like that of newer models."""
    written = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    written.train_from_iterator(["\u2581the\u2581quick\u2581fox\u2581says\u2581hello"] * 9, trainers.BpeTrainer(
        vocab_size=340, special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]))
    written.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    written.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    path = changed(folder, tmp_path / "model", model_type="llama", vocab_size=340)
    written.save(f"{path}/tokenizer.json")
    with open(f"{path}/tokenizer_config.json", "w") as file:
        json.dump({"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, file)
    tokens = load_tokenizer(path).tokenize("<s>the fox</s>hello")
    assert tokens == written.encode("<s>the fox</s>hello").tokens
    assert tokens[tokens.index("</s>") + 1].startswith("\u2581")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("load", [load_policy, load_critic])
def test_weights_that_are_no_numbers_are_named(folder, tmp_path, mesh, number, load):
    path = changed(folder, tmp_path / "model")
    weights = load_file(f"{path}/model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = number
    save_file(weights, f"{path}/model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="differs from what transformers computes by nan"):
        load(path, mesh, torch.float32)


@pytest.mark.parametrize("missing, message", [
    ("config.json", "config.json cannot be read: ValueError"), ("tokenizer", "no tokenizer")])
def test_an_incomplete_model_folder_is_named(folder, tmp_path, missing, message):
    path = shutil.copytree(folder, tmp_path / "model")
    for name in os.listdir(path):
        if name.startswith(missing):
            os.remove(path / name)
    with pytest.raises(ValueError, match=message):
        check_model(str(path))


def cut_short(path):
    os.truncate(path, os.path.getsize(path) - 100)


def garbage(path):
    path.write_bytes(b"\xff\0garbage" * 20)


def empty(path):
    path.write_bytes(b"")


def another_kind(path):
    os.remove(path)
    os.mkdir(path)


@pytest.mark.parametrize("harm", [cut_short, garbage, empty, another_kind])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_damaged_file_is_named(folder, tmp_path, name, harm):
    path = shutil.copytree(folder, tmp_path / "model")
    harm(path / name)
    named = "its tokenizer" if name == "tokenizer.json" else name
    with pytest.raises(ValueError, match=f"^model.*{named} cannot be read: "):
        check_model(str(path))
        load_tokenizer(str(path))


def in_shards(make_index):
    """Harm: the weights become the first of two shards, whose index names what make_index(names) returns."""
    def harm(path):
        names = sorted(load_file(path))
        os.rename(path, path.with_name(SHARDS[0]))
        path.with_name("model.safetensors.index.json").write_text(make_index(names))
    return harm


def pickled(content):
    """Harm: weights in PyTorch's own format, with this content."""
    def harm(path):
        os.remove(path)
        path.with_name("pytorch_model.bin").write_bytes(content)
    return harm


SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
HF_ENGINE = SimpleNamespace(engine="hf", images="", vllm_gpu_memory_utilization=0.4)
LOADERS = [("model", lambda path, mesh: load_policy(path, mesh, torch.float32)),
           ("critic_model", lambda path, mesh: load_critic(path, mesh, torch.float32)),
           ("model", lambda path, mesh: load_engine(HF_ENGINE, path, torch.float32, 64, [10]))]


@pytest.mark.parametrize("harm, reason", [
    (os.remove, "no file named model.safetensors"), (another_kind, "no file named model.safetensors"),
    (cut_short, "not fully covered"), (garbage, "header"), (empty, "header"),
    (in_shards(lambda names: json.dumps({"metadata": {}, "weight_map": {
        name: SHARDS[i % 2] for i, name in enumerate(names)}})), SHARDS[1]),
    (in_shards(lambda names: "[]"), "TypeError"), (in_shards(lambda names: "{"), "JSONDecodeError"),
    (in_shards(lambda names: json.dumps({"weight_map": 1})), "AttributeError"),
    (pickled(b"garbage"), "UnpicklingError"), (pickled(b""), "EOFError"),
    (pickled(b"cposix\nmkdir\n(Vowned\ntR."), "UnpicklingError")])
@pytest.mark.parametrize("key, load", LOADERS, ids=["policy", "critic", "engine"])
def test_weights_that_cannot_be_read_are_named_when_they_are_loaded(folder, tmp_path, mesh, monkeypatch, harm,
                                                                    reason, key, load):
    """And no code in them is run."""
    path = shutil.copytree(folder, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    harm(path / "model.safetensors")
    check_model(str(path))
    with pytest.raises(ValueError, match=f"^({key}|model)={path}.*{reason}"):
        load(str(path), mesh)
    assert not os.path.exists("owned")


def test_weights_of_another_shape_are_named(folder, tmp_path, mesh):
    path = shutil.copytree(folder, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    shapes = r"weight has the shape \[.*128.*\] in its weights, but by its config \[.*96.*\]"
    with pytest.raises(ValueError, match=shapes):
        load_policy(str(path), mesh, torch.float32)


def test_an_adapter_next_to_a_model_is_refused(folder, tmp_path):
    path = shutil.copytree(folder, tmp_path / "model")
    (path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds an adapter"):
        check_model(str(path))


def test_a_model_reads_only_so_many_tokens(folder):
    check_model(folder, length=256)
    with pytest.raises(ValueError, match=r"257 tokens, but by its config \(max_position_embeddings\) the model takes 256$"):
        check_model(folder, length=257)


def test_a_missing_model_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        check_model(str(tmp_path / "nothing"))


def test_a_name_that_the_hub_does_not_know_is_named(monkeypatch):
    def refuse(path, **_):
        raise OSError(f"{path} is not a valid model identifier\nand much more")
    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", refuse)
    with pytest.raises(ValueError, match="critic_model=nonsuch: no such .* not a valid model identifier"):
        check_model("nonsuch", "critic_model")
