"""Exercise 6: QK-norm under the gate."""

from model import PARTS, GatedSpiralAttention, unit_rms


class GatedQKNorm(GatedSpiralAttention):
    """Queries and keys are normalised as they leave the projection, before the gate and the rotation."""

    def project(self, x):
        q, k, v = super().project(x)
        return unit_rms(q), unit_rms(k), v


PARTS["mixer"]["gated_qk_norm"] = GatedQKNorm
