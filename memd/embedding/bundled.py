"""The bundled embedding model as fastembed runs it.

Rule: importing this takes a second, for fastembed; only `loading.py` does, when the model is loaded. The model touches
neither the network nor any file outside `memd/assets`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastembed.common.model_description import DenseModelDescription, ModelSource, PoolingType
from fastembed.text.custom_text_embedding import CustomTextEmbedding, PostprocessingConfig

from memd.assets import model_dir
from memd.embedding.fastembed import FastembedEmbedder, fingerprint_of
from memd.errors import EmbeddingError

if TYPE_CHECKING:
    from onnxruntime import SessionOptions

_NAME = "memd/all-MiniLM-L6-v2-int8"
_DIMENSION = 384
_DISABLED_OPTIMIZER = "SkipLayerNormFusion"
"""The fused operator that it puts in place of an addition and a normalisation takes five times as long as the two, a
fifth of the whole model's time (bench/NOTES.md, 2026-11-22), and rounds differently: without it the vectors are nearer
to those of the graph in the file."""


class BundledModel(CustomTextEmbedding):
    """The model in `memd/assets`: the mean of its last layer, of length one."""

    # Of its own: fastembed's registry of custom models is one list for the whole process.
    SUPPORTED_MODELS = [  # noqa: RUF012  # its base declares it without ClassVar
        DenseModelDescription(
            model=_NAME,
            sources=ModelSource(hf=_NAME),  # required, never asked: the path below is what is loaded
            model_file="model.onnx",
            description="",
            license="apache-2.0",
            size_in_GB=0.02,
            dim=_DIMENSION,
        )
    ]
    POSTPROCESSING_MAPPING = {  # noqa: RUF012  # the same
        _NAME: PostprocessingConfig(pooling=PoolingType.MEAN, normalization=True)
    }

    def __init__(self, threads: int) -> None:
        folder = str(model_dir())
        super().__init__(
            _NAME,
            cache_dir=folder,  # nothing is cached; the default would create a folder among the temporary files
            threads=threads,
            providers=["CPUExecutionProvider"],  # a GPU would give other vectors than the stored ones
            specific_model_path=folder,
        )

    @classmethod
    def add_extra_session_options(cls, session_options: SessionOptions, extra_options: dict[str, Any]) -> None:
        """See fastembed's `OnnxModel`: called before the session is made."""
        super().add_extra_session_options(session_options, extra_options)
        session_options.add_session_config_entry("optimization.disable_specified_optimizers", _DISABLED_OPTIMIZER)


def load_bundled(name: str, threads: int) -> FastembedEmbedder:
    """Load the bundled model under the name by which the settings know it; see `loading.load_embedder`.

    Raises:
        EmbeddingError: its files are missing or damaged.
    """
    folder = model_dir()
    try:
        return FastembedEmbedder(name, BundledModel(threads), fingerprint_of(folder, ["model.onnx", "tokenizer.json"]))
    except Exception as error:  # as in `load_fastembed`
        raise EmbeddingError(
            f"the bundled embedding model in {folder} could not be loaded: {error}; reinstall memd"
        ) from error
