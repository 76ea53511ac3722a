"""
The loss scale of float16 runs. Runs in another dtype do not open this file.

In float16 the layers' gradients would be 0 below 6e-8, so they are computed 2 ** exponent times as large, and
divided by it once they are float32. The exponent, of which only the whole part counts, is in run.state. It
grows by 1 in a hundred updates, and falls by 1 when a gradient was too large for float16.

    scale_losses    sets the scale of each of a run's networks
    overflows       adapts it to a gradient
"""
from torch.distributed.fsdp import FSDPModule

FIRST_EXPONENT = 16             # as in torch.amp.GradScaler


def scale_losses(run):
    """Set the loss scale of each of a run's networks, for a resumed run to what it was."""
    for place in run.networks:
        name = place or "actor"
        scale_loss(run, name, run.state["loss_scale"].get(name, FIRST_EXPONENT))


def overflows(run, name, finite):
    """Adapt the loss scale of a network; return whether its gradient was only too large for the scale.

    finite: whether the gradient is finite.
    """
    exponent = run.state["loss_scale"][name]
    too_large = not finite and exponent >= 1
    scale = scale_loss(run, name, exponent + 0.01 if finite else max(0, int(exponent) - 1))
    run.log.metrics[f"{name}/loss_scale"] = scale
    if too_large:
        run.log.say(f"step {run.state['step']}: a gradient of the {name} is too large for float16, so its "
                    f"update is skipped and the loss scale becomes {scale:g}")
    return too_large


def scale_loss(run, name, exponent):
    # Sets and returns the loss scale of a network.
    scale = 2.0 ** int(exponent)
    run.state["loss_scale"][name] = exponent
    network, _ = run.networks["" if name == "actor" else name]
    set_loss_scale(network, scale)
    return scale


def set_loss_scale(network, scale):
    """From now on, compute a network's gradients `scale` times as large, and divide them by it in float32.

    The scale acts before the gradient of the logits is rounded to the layers' dtype. FSDP hands its hook the
    gradient of one micro-batch, in float32 and summed over the ranks.
    """
    def unscale(gradient):
        gradient.div_(scale)

    if not hasattr(network, "loss_scale"):
        network.register_forward_hook(scale_gradient)
    network.loss_scale = scale
    for part in network.modules():
        if isinstance(part, FSDPModule):
            part.set_all_reduce_hook(unscale)


def scale_gradient(network, inputs, outputs):
    # A hook of a network's forward: the gradient of each output is loss_scale times as large.
    def scaled(gradient):
        if gradient is not None:            # None for an entropy that is only logged
            return gradient * network.loss_scale

    if not isinstance(outputs, tuple):
        outputs = [outputs]
    for output in outputs:
        if output.requires_grad:
            output.register_hook(scaled)
