"""
Whether the weights of a sync arrived: sums over the bits of tensors, which trainer and engine compare.

    checksum        the sum of a tensor's bits
    load_checked    lets an engine load weights, and compares what it has with what the trainer has
    reload_vllm     lets vLLM load weights, and says what it wrote

The trainer's sums come behind the tensors, in the same iterator or message. A sum does not depend on the order
of what is added, so it does not see whether numbers have changed places inside a tensor.
"""
import torch

SUMS = "checksums"              # the name that weights.engine_weights gives to its last pair


def checksum(tensor):
    """Return the sum of a tensor's bits, read as whole numbers, modulo 2 ** 64, as an int.

    If each row, which is along the last dimension, consists of whole words of 8 bytes, then the words are the
    numbers: PyTorch adds these forty times as fast as shorter ones. Otherwise, and in a vector, each element is
    a number. So the checksums of pieces add up to that of the whole if the cuts are between rows, if they are
    between words of rows, and anywhere in a vector.
    """
    tensor = tensor.contiguous()
    if tensor.storage_offset() % 8:             # as in a message: a word could begin in the middle of another
        tensor = tensor.clone()
    size = tensor.element_size()
    if tensor.ndim > 1 and tensor.shape[-1] * size % 8 == 0:
        size = 8
    return tensor.view(getattr(torch, f"int{8 * size}")).sum().item()


def load_checked(load, named_tensors, version):
    """Let an engine load the weights that weights.engine_weights yields; raise RuntimeError if it has others.

    load(named_tensors) returns {name: checksum} of the tensors that the engine has now.
    """
    sums = {}                                                   # {name: checksum} of the trainer's tensors

    def tensors():
        for name, tensor in named_tensors:
            if name == SUMS:
                sums.update(tensor)
            else:
                yield name, tensor

    stream = tensors()
    held = load(stream)
    for _ in stream:                                            # the sums come last, whatever it has taken
        pass
    wrong = [name for name in sums if held.get(name) != sums[name]]
    if wrong or not sums:
        raise RuntimeError(f"the sync of version {version} has failed: the engine has {len(held)} weights of the "
                           f"trainer's {len(sums)}, and these are missing or differ: {wrong[:8]}")


def reload_vllm(llm, named_tensors, ranks, has_head):
    """Let a vllm.LLM load weights; return {name: checksum} of the tensors that it has written.

    vLLM joins what it gets, cuts it for `ranks` ranks and may pack it, so weights cannot be read back. But it
    first calls each weight loader on a parameter without numbers, to count the elements that it copies, and
    these counts are seen here. If several ranks share the engine, each has to write its part. It is not
    counted whether a bias is written (vLLM 0.25), or a head, which vLLM may leave out if it is tied.
    """
    from vllm.model_executor.model_loader.reload import layerwise
    count = layerwise.get_numel_loaded
    copied = []                                                 # numbers of elements of the newest tensor
    held = {}

    def watched_count(*arguments):
        elements, result = count(*arguments)
        copied.append(elements)
        return elements, result

    def tensors():
        for name, tensor in named_tensors:
            copied.clear()
            if has_head or "lm_head." not in name:
                yield name, tensor
            if sum(copied) * ranks >= tensor.numel() or name.endswith(("bias", "lm_head.weight")):
                held[name] = checksum(tensor)

    layerwise.get_numel_loaded = watched_count
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors()})
    layerwise.get_numel_loaded = count
    return held
