"""Tables and time series."""

from __future__ import annotations

import importlib

import torch
from torch import nn

from .. import Built
from .subjects import SUBJECTS, Build, integers, normal, subject


@subject("pytorch-tabnet/TabNet")
def _() -> Built:
    from pytorch_tabnet.tab_network import TabNet

    return TabNet(10, 3, group_attention_matrix=torch.eye(10)), (normal(8, 10),), {}


@subject("tab-transformer-pytorch/TabTransformer")
def _() -> Built:
    from tab_transformer_pytorch import TabTransformer

    return (
        TabTransformer(mlp_act=nn.ReLU(), categories=(5, 4, 3), num_continuous=4, dim=16, dim_out=1, depth=2, heads=2),
        (integers(3, 6, 3), normal(6, 4)),
        {},
    )


@subject("tab-transformer-pytorch/FTTransformer")
def _() -> Built:
    from tab_transformer_pytorch import FTTransformer

    return (
        FTTransformer(categories=(5, 4, 3), num_continuous=4, dim=16, dim_out=1, depth=2, heads=2),
        (integers(3, 6, 3), normal(6, 4)),
        {},
    )


@subject("rtdl_revisiting_models/FTTransformer")
def _() -> Built:
    from rtdl_revisiting_models import FTTransformer

    k = FTTransformer.get_default_kwargs(n_blocks=1)
    return (
        FTTransformer(n_cont_features=4, cat_cardinalities=[3, 4], d_out=2, **k),
        (normal(6, 4), integers(3, 6, 2)),
        {},
    )


@subject("rtdl_revisiting_models/ResNet")
def _() -> Built:
    from rtdl_revisiting_models import ResNet

    return (
        ResNet(
            d_in=8, d_out=2, n_blocks=2, d_block=32, d_hidden=64, d_hidden_multiplier=None, dropout1=0.1, dropout2=0.0
        ),
        (normal(6, 8),),
        {},
    )


@subject("rtdl_num_embeddings/PLR")
def _() -> Built:
    from rtdl_num_embeddings import PeriodicEmbeddings

    return nn.Sequential(PeriodicEmbeddings(6, 8, lite=False), nn.Flatten(), nn.Linear(48, 2)), (normal(6, 6),), {}


@subject("tabm/TabM")
def _() -> Built:
    from tabm import TabM

    return TabM.make(n_num_features=8, d_out=1, n_blocks=2, d_block=32, k=4), (normal(6, 8),), {}


@subject("pytorch-tabular/gated tree")
def _() -> Built:
    from pytorch_tabular.models.common.layers import GatedFeatureLearningUnit

    return GatedFeatureLearningUnit(8, 2), (normal(6, 8),), {}


def _tsai(name: str, module: str = "", **options: int) -> Build:
    def build() -> Built:
        found = importlib.import_module(f"tsai.models.{module or name}")
        return getattr(found, name)(c_in=3, c_out=2, **options), (normal(2, 3, 32),), {}

    return build


for _name in ("InceptionTime", "XceptionTime", "TCN", "FCN", "ResNet", "RNN"):
    SUBJECTS[f"tsai/{_name}"] = _tsai(_name)
for _name in ("XCM", "gMLP"):
    SUBJECTS[f"tsai/{_name}"] = _tsai(_name, seq_len=32)
SUBJECTS["tsai/LSTM_FCN"] = _tsai("LSTM_FCN", "RNN_FCN", seq_len=32)


@subject("tsai/TST")
def _() -> Built:
    from tsai.models.TST import TST

    return TST(c_in=3, c_out=2, seq_len=32, d_model=16, n_heads=2, d_ff=32, n_layers=1), (normal(2, 3, 32),), {}


@subject("tsai/PatchTST")
def _() -> Built:
    from tsai.models.PatchTST import PatchTST

    return (
        PatchTST(c_in=3, c_out=None, seq_len=32, pred_dim=8, n_layers=1, n_heads=2, d_model=16, d_ff=32),
        (normal(2, 3, 32),),
        {},
    )


@subject("tsai/MINIROCKET")
def _() -> Built:
    from tsai.models.MINIROCKET_Pytorch import MiniRocketFeatures

    m = MiniRocketFeatures(3, 32, num_features=168)
    m.fit(normal(8, 3, 32))
    return m, (normal(2, 3, 32),), {}


@subject("pytorch-forecasting/gated residual network")
def _() -> Built:
    from pytorch_forecasting.models.temporal_fusion_transformer.sub_modules import GatedResidualNetwork

    return GatedResidualNetwork(16, 32, 16), (normal(4, 16),), {}


@subject("pytorch-forecasting/interpretable attention")
def _() -> Built:
    from pytorch_forecasting.models.temporal_fusion_transformer.sub_modules import InterpretableMultiHeadAttention

    return InterpretableMultiHeadAttention(2, 16), (normal(2, 6, 16), normal(2, 6, 16), normal(2, 6, 16)), {}


@subject("iTransformer/iTransformer")
def _() -> Built:
    from iTransformer import iTransformer

    return (
        iTransformer(num_variates=5, lookback_len=16, dim=32, depth=1, heads=2, dim_head=16, pred_length=4),
        (normal(1, 16, 5),),
        {},
    )


@subject("chronos-forecasting/ChronosBolt")
def _() -> Built:
    from chronos.chronos_bolt import ChronosBoltModelForForecasting
    from transformers import T5Config

    c = T5Config(  # type: ignore[call-arg] # of Chronos: kept with the others
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=2,
        vocab_size=2,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    c.chronos_config = {
        "context_length": 32,
        "prediction_length": 8,
        "input_patch_size": 8,
        "input_patch_stride": 8,
        "quantiles": [0.1, 0.5, 0.9],
        "use_reg_token": True,
    }
    return ChronosBoltModelForForecasting(c), (normal(2, 32),), {}
