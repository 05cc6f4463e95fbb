"""A one-stage detector: backbone, feature pyramid, heads, decoded boxes, and the ten best scores."""

import torch
import torch.nn.functional as F
from torch import nn

ANCHOR = 4.0


class ConvNorm(nn.Module):
    def __init__(self, width_in, width, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width, eps=1e-3)

    def forward(self, x):
        x = self.conv(x)
        x = self.norm(x)
        return F.silu(x)


class Bottleneck(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = ConvNorm(width, width)
        self.second = ConvNorm(width, width)

    def forward(self, x):
        y = self.second(self.first(x))
        return x + y


class Detector(nn.Module):
    def __init__(self, width=16, classes=5):
        super().__init__()
        self.stem = ConvNorm(3, width, 2)
        self.stage3 = nn.Sequential(ConvNorm(width, width, 2), Bottleneck(width))
        self.stage4 = nn.Sequential(ConvNorm(width, width, 2), Bottleneck(width))
        self.lateral3 = nn.Conv2d(width, width, 1)
        self.lateral4 = nn.Conv2d(width, width, 1)
        self.pool = nn.Conv2d(4 * width, width, 1)
        self.tower = ConvNorm(width, width)
        self.scores = nn.Conv2d(width, classes, 3, padding=1)
        self.deltas = nn.Conv2d(width, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.tensor([1.0, 1.25]))

    def spatial_pool(self, x):
        one = F.max_pool2d(x, 5, 1, 2)
        two = F.max_pool2d(one, 5, 1, 2)
        three = F.max_pool2d(two, 5, 1, 2)
        joined = torch.cat([x, one, two, three], 1)
        return self.pool(joined)

    def grid(self, height, width, stride, x):
        rows = (torch.arange(height, device=x.device) + 0.5) * stride
        columns = (torch.arange(width, device=x.device) + 0.5) * stride
        rows, columns = torch.meshgrid(rows, columns, indexing="ij")
        return torch.stack([columns, rows], -1).reshape(-1, 2)

    def decode(self, deltas, centers, stride):
        shift = deltas[..., :2] * stride
        size = deltas[..., 2:].clamp(max=4.0).exp() * ANCHOR
        middle = centers + shift
        low = middle - size / 2
        high = middle + size / 2
        return torch.cat([low, high], -1)

    def forward(self, images):
        images = (images - 0.45) / 0.225
        c3 = self.stage3(self.stem(images))
        c4 = self.stage4(c3)
        p4 = self.lateral4(self.spatial_pool(c4))
        up = F.interpolate(p4, scale_factor=2.0, mode="bilinear", align_corners=False)
        p3 = self.lateral3(c3) + up
        boxes, scores = [], []
        for index, (level, stride) in enumerate(((p3, 4), (p4, 8))):
            hidden = self.tower(level)
            logits = self.scores(hidden).permute(0, 2, 3, 1).flatten(1, 2)
            deltas = self.deltas(hidden).permute(0, 2, 3, 1).flatten(1, 2)
            deltas = deltas * self.scale[index]
            centers = self.grid(*level.shape[-2:], stride, level)
            boxes.append(self.decode(deltas, centers, stride))
            scores.append(logits.sigmoid())
        boxes = torch.cat(boxes, 1)
        scores = torch.cat(scores, 1)
        best = scores.amax(-1)
        top, places = best.topk(10)
        picked = boxes.gather(1, places[..., None].expand(-1, -1, 4))
        return {"boxes": picked, "scores": top}


def build():
    torch.manual_seed(3)
    model = Detector()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.2, 2)
            module.weight.data.uniform_(0.5, 1.5)
            module.bias.data.normal_(0, 0.2)
    return model.eval()


def inputs():
    return (torch.rand(2, 3, 48, 64, generator=torch.Generator().manual_seed(1)),)
