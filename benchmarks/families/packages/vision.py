"""Images: transformers, segmentation, matching, restoration."""

from __future__ import annotations

from .. import Built
from .subjects import SUBJECTS, Build, integers, normal, subject, uniform


def _vit(mod, cls, **k) -> Build:
    def build() -> Built:
        import importlib

        m = getattr(importlib.import_module(f"vit_pytorch.{mod}"), cls)(**k)
        return m, (normal(1, 3, 32, 32),), {}

    return build


PLAIN = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64}
SUBJECTS["vit-pytorch/ViT"] = _vit("vit", "ViT", **PLAIN)
SUBJECTS["vit-pytorch/SimpleViT"] = _vit("simple_vit", "SimpleViT", **PLAIN)
SUBJECTS["vit-pytorch/DeepViT"] = _vit("deepvit", "DeepViT", **PLAIN)
SUBJECTS["vit-pytorch/CaiT"] = _vit("cait", "CaiT", cls_depth=1, **PLAIN)
SUBJECTS["vit-pytorch/T2TViT"] = _vit(
    "t2t", "T2TViT", image_size=32, num_classes=10, dim=32, depth=2, heads=2, mlp_dim=64, t2t_layers=((7, 4), (3, 2))
)
SUBJECTS["vit-pytorch/CrossViT"] = _vit(
    "cross_vit",
    "CrossViT",
    image_size=32,
    num_classes=10,
    depth=1,
    sm_dim=16,
    sm_patch_size=8,
    sm_enc_depth=1,
    sm_enc_heads=2,
    sm_enc_mlp_dim=32,
    lg_dim=32,
    lg_patch_size=16,
    lg_enc_depth=1,
    lg_enc_heads=2,
    lg_enc_mlp_dim=32,
    cross_attn_depth=1,
    cross_attn_heads=2,
)
SUBJECTS["vit-pytorch/NesT"] = _vit(
    "nest",
    "NesT",
    image_size=32,
    patch_size=4,
    dim=16,
    heads=2,
    num_hierarchies=2,
    block_repeats=(1, 1),
    num_classes=10,
)
SUBJECTS["vit-pytorch/CvT"] = _vit(
    "cvt", "CvT", num_classes=10, s1_emb_dim=8, s2_emb_dim=16, s2_heads=1, s3_emb_dim=32, s3_heads=1, s3_depth=1
)
SUBJECTS["vit-pytorch/PiT"] = _vit(
    "pit", "PiT", image_size=32, patch_size=8, dim=32, num_classes=10, depth=(1, 1), heads=2, mlp_dim=64
)
SUBJECTS["vit-pytorch/MaxViT"] = _vit(
    "max_vit", "MaxViT", num_classes=10, dim_conv_stem=16, dim=16, dim_head=8, depth=(1, 1), window_size=4
)
SUBJECTS["vit-pytorch/RegionViT"] = _vit(
    "regionvit", "RegionViT", dim=(16, 32, 32, 32), depth=(1, 1, 1, 1), window_size=2, num_classes=10
)
SUBJECTS["vit-pytorch/XCiT"] = _vit(
    "xcit", "XCiT", image_size=32, patch_size=8, num_classes=10, dim=32, depth=1, cls_depth=1, heads=2, mlp_dim=64
)


@subject("vit-pytorch/NaViT packed")
def _() -> Built:
    from vit_pytorch.na_vit import NaViT

    return (
        NaViT(image_size=32, patch_size=8, num_classes=10, dim=32, depth=1, heads=2, mlp_dim=64),
        ([[normal(3, 16, 32), normal(3, 32, 8)], [normal(3, 24, 16)]],),
        {},
    )


def _smp(arch, enc="resnet18", **k) -> Build:
    def build() -> Built:
        import segmentation_models_pytorch as smp

        return getattr(smp, arch)(enc, encoder_weights=None, classes=3, **k), (normal(1, 3, 64, 64),), {}

    return build


for arch in "Unet UnetPlusPlus MAnet Linknet FPN PSPNet DeepLabV3 DeepLabV3Plus Segformer UPerNet".split():
    SUBJECTS[f"segmentation-models-pytorch/{arch}"] = _smp(arch)


def _monai(cls, shape, mod="monai.networks.nets", **k) -> Build:
    def build() -> Built:
        import importlib

        return getattr(importlib.import_module(mod), cls)(**k), (normal(*shape),), {}

    return build


SUBJECTS["monai/UNet"] = _monai(
    "UNet",
    (1, 1, 32, 32),
    spatial_dims=2,
    in_channels=1,
    out_channels=2,
    channels=(4, 8, 16),
    strides=(2, 2),
    num_res_units=1,
)
SUBJECTS["monai/UNet 3-d"] = _monai(
    "UNet", (1, 1, 16, 16, 16), spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,)
)
SUBJECTS["monai/SegResNet"] = _monai(
    "SegResNet", (1, 1, 32, 32), spatial_dims=2, init_filters=8, in_channels=1, out_channels=2
)
SUBJECTS["monai/AttentionUnet"] = _monai(
    "AttentionUnet", (1, 1, 32, 32), spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,)
)
SUBJECTS["monai/UNETR"] = _monai(
    "UNETR",
    (1, 1, 32, 32),
    in_channels=1,
    out_channels=2,
    img_size=(32, 32),
    feature_size=8,
    hidden_size=48,
    mlp_dim=64,
    num_heads=4,
    spatial_dims=2,
)
SUBJECTS["monai/SwinUNETR"] = _monai(
    "SwinUNETR", (1, 1, 64, 64), in_channels=1, out_channels=2, feature_size=12, spatial_dims=2
)
SUBJECTS["monai/DynUNet"] = _monai(
    "DynUNet",
    (1, 1, 32, 32),
    spatial_dims=2,
    in_channels=1,
    out_channels=2,
    kernel_size=[3, 3, 3],
    strides=[1, 2, 2],
    upsample_kernel_size=[2, 2],
    filters=[4, 8, 16],
)
SUBJECTS["monai/VarAutoEncoder"] = _monai(
    "VarAutoEncoder",
    (1, 1, 32, 32),
    spatial_dims=2,
    in_shape=(1, 32, 32),
    out_channels=1,
    latent_size=4,
    channels=(4, 8),
    strides=(2, 2),
)
SUBJECTS["monai/DenseNet121"] = _monai(
    "DenseNet121",
    (1, 1, 64, 64),
    spatial_dims=2,
    in_channels=1,
    out_channels=2,
    init_features=8,
    growth_rate=4,
    block_config=(2, 2),
)


@subject("kornia/HardNet")
def _() -> Built:
    import kornia

    return kornia.feature.HardNet(False), (uniform(4, 1, 32, 32),), {}


@subject("kornia/SIFT descriptor")
def _() -> Built:
    import kornia

    return kornia.feature.SIFTDescriptor(32), (uniform(4, 1, 32, 32),), {}


@subject("kornia/LoFTR")
def _() -> Built:
    import kornia

    return kornia.feature.LoFTR(None), ({"image0": uniform(1, 1, 64, 64), "image1": uniform(1, 1, 64, 64)},), {}


@subject("segment-anything/tiny SAM")
def _() -> Built:
    from segment_anything.modeling import ImageEncoderViT

    return (
        ImageEncoderViT(
            img_size=64,
            patch_size=16,
            embed_dim=32,
            depth=2,
            num_heads=2,
            out_chans=16,
            use_rel_pos=True,
            window_size=2,
            global_attn_indexes=(1,),
        ),
        (normal(1, 3, 64, 64),),
        {},
    )


@subject("segment-anything/mask decoder")
def _() -> Built:
    from segment_anything.modeling import MaskDecoder, TwoWayTransformer

    return (
        MaskDecoder(
            transformer_dim=32, transformer=TwoWayTransformer(depth=1, embedding_dim=32, mlp_dim=64, num_heads=2)
        ),
        (),
        {
            "image_embeddings": normal(1, 32, 4, 4),
            "image_pe": normal(1, 32, 4, 4),
            "sparse_prompt_embeddings": normal(2, 3, 32),
            "dense_prompt_embeddings": normal(2, 32, 4, 4),
            "multimask_output": True,
        },
    )


@subject("open_clip_torch/CLIP")
def _() -> Built:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    return (
        CLIP(
            32,
            CLIPVisionCfg(layers=2, width=64, head_width=32, patch_size=8, image_size=32),
            CLIPTextCfg(context_length=16, vocab_size=64, width=32, heads=2, layers=2),
        ),
        (normal(2, 3, 32, 32), integers(64, 2, 16)),
        {},
    )


@subject("efficientnet-pytorch/b0")
def _() -> Built:
    from efficientnet_pytorch import EfficientNet

    return EfficientNet.from_name("efficientnet-b0", num_classes=10), (normal(1, 3, 64, 64),), {}


@subject("spandrel/SRVGG")
def _() -> Built:
    from spandrel.architectures.Compact import Compact

    return Compact(num_feat=16, num_conv=4, upscale=2), (uniform(1, 3, 16, 16),), {}


@subject("spandrel/RRDBNet")
def _() -> Built:
    from spandrel.architectures.ESRGAN import ESRGAN

    return ESRGAN(num_filters=16, num_blocks=1, scale=2), (uniform(1, 3, 16, 16),), {}


@subject("spandrel/SwinIR")
def _() -> Built:
    from spandrel.architectures.SwinIR import SwinIR

    return (
        SwinIR(
            img_size=16, embed_dim=24, depths=[2], num_heads=[2], window_size=4, upscale=2, upsampler="pixelshuffle"
        ),
        (uniform(1, 3, 16, 16),),
        {},
    )


@subject("lpips/LPIPS")
def _() -> Built:
    import lpips

    return lpips.LPIPS(net="squeeze", pnet_rand=True, verbose=False), (uniform(1, 3, 64, 64), uniform(1, 3, 64, 64)), {}


@subject("piq/SSIM loss")
def _() -> Built:
    import piq

    return piq.SSIMLoss(), (uniform(1, 3, 32, 32), uniform(1, 3, 32, 32)), {}


@subject("compressai/factorised prior")
def _() -> Built:
    from compressai.models import FactorizedPrior

    m = FactorizedPrior(16, 24)
    m.update()
    return m, (uniform(1, 3, 64, 64),), {}
