"""
Whether the weights of a sync arrived: sums over the bits of tensors, which trainer and engine compare.

    checksum        the sum of a tensor's bits
    load_checked    lets an engine load weights, and compares what it has with what the trainer has
    reload_vllm     lets vLLM load weights, and says what it wrote

The trainer's sums come after the tensors, in the same iterator. A sum does not depend on the order of what is
added, so it does not see whether numbers have changed places inside a tensor.
"""
import torch

SUMS = "checksums"              # the name that weights.engine_weights gives to its last pair


def checksum(tensor):
    """Return the sum of a tensor's bits, read as whole numbers, modulo 2 ** 64, as an int.

    If the rows, along the last dimension, consist of whole words of 8 bytes, the numbers are these words,
    which PyTorch adds forty times as fast as shorter ones. Otherwise, and in a vector, each element is one.
    So the checksums of pieces add up to that of the whole, modulo 2 ** 64, if the cuts are between rows, or
    between words of rows, or anywhere in a vector.
    """
    tensor = tensor.contiguous()
    if tensor.storage_offset() % 8:         # in a message a tensor may begin in the middle of a word
        tensor = tensor.clone()
    size = tensor.element_size()
    if tensor.ndim > 1 and tensor.shape[-1] * size % 8 == 0:
        size = 8
    return tensor.view(getattr(torch, f"int{8 * size}")).sum().item()


def load_checked(load, named_tensors, version):
    """Let an engine load what weights.engine_weights yields. Raise RuntimeError if it then has other weights.

    load(named_tensors) loads, and returns {name: checksum} of the tensors that the engine has got.
    """
    sums = {}                               # {name: checksum} of the trainer's tensors, once they have come

    def tensors():
        for name, tensor in named_tensors:
            if name == SUMS:
                sums.update(tensor)
            else:
                yield name, tensor

    stream = tensors()
    held = load(stream)
    for _ in stream:                        # the sums come last, even if the engine has not taken everything
        pass
    wrong = [name for name in sums if held.get(name) != sums[name]]
    if wrong or not sums:
        raise RuntimeError(
            f"the sync of version {version} has failed: the trainer has {len(sums)} weights, the engine got "
            f"{len(held)}, and these are missing or differ: {wrong[:8]}. If none is named, the weights broke "
            "off before the trainer's list of them came")


def reload_vllm(llm, named_tensors, ranks, has_head):
    """Let a vllm.LLM load weights; return {name: checksum} of the tensors that it has written.

    ranks: how many ranks share the engine. has_head: whether vLLM takes a head at all.

    vLLM joins and cuts what it gets, and may pack it, so it cannot be read back. But before it loads a
    tensor, it calls the weight loader on a parameter without numbers, to count the elements that the loader
    copies. These counts are seen here. On one rank they have to be the whole tensor, on several a part of
    it. Biases, which vLLM 0.25 does not count, and heads, which it may leave out if they are tied, need not
    be counted.
    """
    from vllm.model_executor.model_loader.reload import layerwise
    count = layerwise.get_numel_loaded
    copied = []                             # how many elements each loader has copied of the newest tensor
    held = {}

    def watched_count(*arguments):
        elements, result = count(*arguments)
        copied.append(elements)
        return elements, result

    def tensors():
        for name, tensor in named_tensors:
            copied.clear()
            # A tensor that comes twice would fail in vLLM, and here the one that is missing gets named.
            if name not in held and (has_head or "lm_head." not in name):
                yield name, tensor
            enough = tensor.numel() if ranks == 1 else 1
            if sum(copied) >= enough or name.endswith(("bias", "lm_head.weight")):
                held[name] = checksum(tensor)

    layerwise.get_numel_loaded = watched_count
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors()})
    layerwise.get_numel_loaded = count
    return held
