"""What an attestation says: checks, what they were of, and the shapes that a model needs."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from shared_ops.model.config import ModelConfig
from shared_ops.model.lora_config import GROUPS, LoraConfig, target_shapes


class AttestationError(RuntimeError):
    """A contract does not hold on this machine; the message names the op and the shape."""


@dataclass(frozen=True)
class Check:
    """One verified fact: which op, at which shape, how many float32 values were compared."""

    op: str
    shape: str
    values: int
    differing: int
    of_threads: int = 0  # of the differing ones, those seen with more than one thread only


@dataclass(frozen=True)
class Report:
    """All checks of one model shape, and digests of the values they produced, by fact.

    facts: "sums" stands for all that is computed in a stated order; others are named after the
        function ("exp") that a library computes as it likes. Two machines with equal digests
        compute the same.
    dropped: schedules that differ and will not be chosen; the others stay exact without them.
    """

    checks: tuple[Check, ...]
    facts: Mapping[str, str]
    seconds: float
    dropped: tuple[Check, ...] = ()

    @property
    def fingerprint(self) -> str:
        """One digest of all facts."""
        return hashlib.sha256(repr(sorted(self.facts.items())).encode()).hexdigest()

    def raise_if_broken(self) -> None:
        """Raise AttestationError for the first check with differing values."""
        for check in self.checks:
            if check.differing:
                is_of_threads = check.differing == check.of_threads
                advice = "use --threads 1 (torch.set_num_threads(1)), and " * is_of_threads
                raise AttestationError(
                    f"{check.op} {check.shape}: {check.differing} of {check.values} values change"
                    f" with {'the number of threads' if is_of_threads else 'batch size'} here:"
                    f" {advice}report this processor and torch version"
                )


def product_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """(K, N) of every product of a decoder, each once."""
    heads = config.num_heads + 2 * config.num_kv_heads
    return sorted(
        {
            (config.hidden_size, heads * config.head_dim),
            (config.num_heads * config.head_dim, config.hidden_size),
            (config.hidden_size, 2 * config.intermediate_size),
            (config.intermediate_size, config.hidden_size),
            (config.hidden_size, config.vocab_size),
        }
    )


def lora_shapes(config: ModelConfig, lora: LoraConfig | None) -> list[tuple[int, int]]:
    """(K, N) of every product of the adapters, each once."""
    if lora is None or not lora.rank:
        return []
    shapes, found = target_shapes(config), set()
    for paths in GROUPS.values():
        chosen = [n for p in paths if (n := p.rpartition(".")[2]) in lora.target_modules]
        for name in chosen:
            outputs, inputs = shapes[name]
            found |= {(inputs, lora.rank * len(chosen)), (lora.rank, outputs)}
    return sorted(found)
