"""Networks over images and videos beside plain convolutions.

Shifted windows, dilated, depth-wise and 3-D convolutions, autoencoders, a critic, deformed sampling, Fourier operators.
"""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "Autoencoder", "Codebook", "Critic", "Deformed", "DepthWise", "Dilated", "FourierOperator", "Patches", "Pyramid", "Video", "Windows",
]  # fmt: skip


class _Window(nn.Module):
    """Attention inside windows of an image, shifted by half a window in every other block."""

    def __init__(self, width: int, *, side: int, shift: int) -> None:
        super().__init__()
        self.heads, self.side, self.shift = width // 32, side, shift
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.all, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn((2 * side - 1) ** 2, self.heads) * 0.02)
        places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")).flatten(1)
        apart = (places[:, :, None] - places[:, None]).permute(1, 2, 0) + side - 1
        self.register_buffer("index", apart[..., 0] * (2 * side - 1) + apart[..., 1])
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        side = self.side
        y = torch.roll(self.norms[0](x), (-self.shift, -self.shift), (1, 2)) if self.shift else self.norms[0](x)
        y = self._parted(y)
        q, k, v = self.all(y).unflatten(-1, (3, self.heads, C // self.heads)).permute(2, 0, 3, 1, 4)
        bias = self.bias[self.index.flatten()].view(side**2, side**2, -1).permute(2, 0, 1)[None]
        if self.shift:
            bias = bias + self._apart(H, W, x.device).repeat(B, 1, 1)[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        y = self.out(y.transpose(1, 2).flatten(2)).view(B, H // side, W // side, side, side, C)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(B, H, W, C)
        x = x + (torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y)
        return x + self.dense(self.norms[1](x))

    def _parted(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        x = x.view(B, H // self.side, self.side, W // self.side, self.side, C)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.side**2, C)

    def _apart(self, height: int, width: int, device: torch.device) -> Tensor:
        regions, count = torch.zeros(1, height, width, 1, device=device), 0
        slices = (slice(0, -self.side), slice(-self.side, -self.shift), slice(-self.shift, None))
        for rows in slices:
            for columns in slices:
                regions[:, rows, columns] = count
                count += 1
        parts = self._parted(regions)[..., 0]
        return torch.zeros(1, device=device).masked_fill(parts[:, None] != parts[:, :, None], -100.0)


class Windows(nn.Module):
    """Shifted-window attention over patches, as in Swin; classifies."""

    def __init__(self, *, width: int, depth: int, side: int = 7, classes: int = 100) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.ModuleList(_Window(width, side=side, shift=at % 2 * (side // 2)) for at in range(depth))
        self.merge = nn.Linear(4 * width, 2 * width)
        self.late = nn.ModuleList(_Window(2 * width, side=side, shift=at % 2 * (side // 2)) for at in range(depth))
        self.norm, self.head = nn.LayerNorm(2 * width), nn.Linear(2 * width, classes)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = self.patches(image).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = block(x)
        corners = [x[:, row::2, column::2] for row in (0, 1) for column in (0, 1)]
        x = self.merge(torch.cat(corners, -1))
        for block in self.late:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean((1, 2))), label, label_smoothing=0.1)


class Patches(nn.Module):
    """A vision transformer with a class token, torch's own layers, norms first."""

    def __init__(self, *, width: int, depth: int, image: int, classes: int = 100) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, width, 16, stride=16), nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, (image // 16) ** 2 + 1, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder, self.head = nn.TransformerEncoder(layer, depth), nn.Linear(width, classes)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return F.cross_entropy(self.head(self.encoder(x)[:, 0]), label)


class Dilated(nn.Module):
    """Convolutions of several dilations side by side, as in DeepLab; a class for each pixel."""

    def __init__(self, *, width: int, depth: int, classes: int = 21) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.body = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=each, dilation=each, bias=False), nn.BatchNorm2d(width), nn.ReLU()
            )
            for each in [1, 2, 4][:depth]
        )
        self.sides = nn.ModuleList(
            nn.Conv2d(width, width, 3 if each > 1 else 1, padding=each if each > 1 else 0, dilation=each, bias=False)
            for each in (1, 6, 12, 18)
        )
        self.join = nn.Sequential(
            nn.Conv2d(4 * width, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout2d(0.1)
        )
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor, classes: Tensor) -> Tensor:
        x = self.stem(image)
        for block in self.body:
            x = x + block(x)
        x = self.head(self.join(torch.cat([side(x) for side in self.sides], 1)))
        x = F.interpolate(x, size=image.shape[-2:], mode="bilinear", align_corners=False)
        return F.cross_entropy(x, classes, ignore_index=255)


class Video(nn.Module):
    """3-D convolutions over short films, pooled and transposed; reconstructs the film."""

    def __init__(self, *, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Conv3d(3, width, (3, 7, 7), stride=(1, 2, 2), padding=(1, 3, 3), bias=False)
        self.body = nn.ModuleList(
            nn.Sequential(
                nn.Conv3d(width, width, 3, padding=1, bias=False), nn.BatchNorm3d(width), nn.ReLU(inplace=True)
            )
            for _ in range(depth)
        )
        self.pool, self.deep = nn.MaxPool3d(2), nn.Conv3d(width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.leave = nn.ConvTranspose3d(width, 3, (1, 2, 2), stride=(1, 2, 2))

    def forward(self, film: Tensor) -> Tensor:
        x = self.enter(film)
        for block in self.body:
            x = x + block(x)
        x = self.up(F.relu(self.deep(self.pool(x))))
        return F.l1_loss(self.leave(F.relu(x)), film)


class _Separable(nn.Module):
    def __init__(self, width: int, *, stride: int, points: int) -> None:
        super().__init__()
        inner = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.Hardswish(),
            nn.Conv2d(inner, inner, points, stride=stride, padding=points // 2, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.SiLU(),
            nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, width, 1), nn.Sigmoid())
        self.adds = stride == 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y = y * self.squeeze(y)
        return x + y if self.adds else y


class DepthWise(nn.Module):
    """Depth-wise separable convolutions with squeeze-and-excitation, as in MobileNet."""

    def __init__(self, *, width: int, depth: int, classes: int = 100) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(
            *[_Separable(width, stride=1 + (at % 3 == 2), points=(3, 5, 7)[at % 3]) for at in range(depth)]
        )
        self.head = nn.Linear(width, classes)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.stem(image)).mean((2, 3))), label)


class Autoencoder(nn.Module):
    """A variational autoencoder: drawn codes, transposed convolutions, instance norm."""

    def __init__(self, *, width: int, image: int, code: int = 64) -> None:
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width]
        self.down = nn.Sequential(
            *[
                nn.Sequential(
                    nn.Conv2d(a, b, 4, stride=2, padding=1), nn.InstanceNorm2d(b, affine=True), nn.LeakyReLU(0.2)
                )
                for a, b in itertools.pairwise(sizes)
            ]
        )
        self.inner = (sizes[-1], image // 8, image // 8)
        count = sizes[-1] * (image // 8) ** 2
        self.code, self.back = nn.Linear(count, 2 * code), nn.Linear(code, count)
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(a, b, 4, stride=2, padding=1) for a, b in zip(sizes[:0:-1], sizes[-2::-1], strict=False)
        )

    def forward(self, image: Tensor) -> Tensor:
        mean, log_variance = self.code(self.down(image).flatten(1)).chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        x = self.back(drawn).unflatten(1, self.inner)
        for layer in self.up:
            x = layer(F.elu(x))
        spread = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        return F.binary_cross_entropy_with_logits(x, image.sigmoid(), reduction="sum") / len(image) + spread


class Codebook(nn.Module):
    """Autoencoder with a codebook and running averages of its use, as in VQ-VAE."""

    def __init__(self, *, width: int, codes: int) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(3, width, 4, stride=2, padding=1), nn.ReLU(), nn.Conv2d(width, width, 4, stride=2, padding=1)
        )
        self.up = nn.Sequential(
            nn.Conv2d(width, width * 4, 3, padding=1),
            nn.PixelShuffle(2),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, stride=2, padding=1),
        )
        self.book = nn.Embedding(codes, width)
        self.register_buffer("used", torch.zeros(codes))

    def forward(self, image: Tensor) -> Tensor:
        x = self.down(image)
        flat = x.permute(0, 2, 3, 1).flatten(0, 2)
        chosen = torch.cdist(flat[None].float(), self.book.weight[None])[0].argmin(-1)
        with torch.no_grad():
            self.used.mul_(0.99).add_(F.one_hot(chosen, len(self.used)).float().mean(0), alpha=0.01)
        near = self.book(chosen).view(*x.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2)
        passed = x + (near - x).detach()
        return F.mse_loss(self.up(passed), image) + F.mse_loss(near, x.detach()) + 0.25 * F.mse_loss(x, near.detach())


class Critic(nn.Module):
    """A critic of images with a gradient penalty, as in Wasserstein GANs, and spectral norm."""

    def __init__(self, *, width: int, depth: int) -> None:
        super().__init__()
        sizes = [3, *[width * 2**at for at in range(depth)]]
        layers = [nn.Conv2d(a, b, 4, stride=2, padding=1) for a, b in itertools.pairwise(sizes)]
        layers[0] = nn.utils.parametrizations.spectral_norm(layers[0])
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(sizes[-1], 1)

    def forward(self, image: Tensor) -> Tensor:
        made = torch.tanh(torch.randn_like(image))
        share = torch.rand(len(image), 1, 1, 1, device=image.device)
        between = (share * image + (1 - share) * made).requires_grad_()
        told = self._judge(between)
        (slope,) = torch.autograd.grad(told.sum(), between, create_graph=True)
        penalty = ((slope.flatten(1).norm(dim=1) - 1) ** 2).mean()
        return self._judge(made).mean() - self._judge(image).mean() + 10 * penalty

    def _judge(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.2)
        return self.head(x.mean((2, 3)))


class Deformed(nn.Module):
    """Convolutions that sample their input at learned offsets, by `grid_sample`; a classifier."""

    def __init__(self, *, width: int, depth: int, classes: int = 100) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.offsets = nn.ModuleList(nn.Conv2d(width, 2 * 4, 3, padding=1) for _ in range(depth))
        self.mixed = nn.ModuleList(nn.Conv2d(4 * width, width, 1) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = self.stem(image)
        identity = torch.eye(2, 3, device=x.device)[None].expand(len(x), -1, -1)
        for offsets, mixed in zip(self.offsets, self.mixed, strict=True):
            grid = F.affine_grid(identity, list(x.shape), align_corners=False)
            moved = offsets(x).unflatten(1, (4, 2)).permute(1, 0, 3, 4, 2)
            found = [F.grid_sample(x, grid + 0.1 * torch.tanh(each), align_corners=False) for each in moved]
            x = x + F.gelu(mixed(torch.cat(found, 1)))
        return F.cross_entropy(self.head(F.adaptive_max_pool2d(x, 1).flatten(1)), label)


class FourierOperator(nn.Module):
    """Products with complex weights in the frequency domain, as in Fourier neural operators."""

    def __init__(self, *, width: int, depth: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.enter, self.leave = nn.Conv2d(3, width, 1), nn.Conv2d(width, 3, 1)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(width, width, modes, modes, 2) / width) for _ in range(depth)
        )
        self.beside = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(depth))

    def forward(self, image: Tensor) -> Tensor:
        x = self.enter(image)
        for weight, beside in zip(self.weights, self.beside, strict=True):
            found = torch.fft.rfft2(x.float())
            kept = torch.zeros_like(found)
            low = found[:, :, : self.modes, : self.modes]
            kept[:, :, : self.modes, : self.modes] = torch.einsum("bixy,ioxy->boxy", low, torch.view_as_complex(weight))
            x = F.gelu(torch.fft.irfft2(kept, s=x.shape[-2:]) + beside(x))
        return F.mse_loss(self.leave(x), image.roll(1, -1))


class Pyramid(nn.Module):
    """Feature pyramid, summed from the coarsest scale down, with a focal loss on each scale."""

    def __init__(self, *, width: int, levels: int, classes: int = 8) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(3 if at == 0 else width, width, 3, stride=2, padding=1), nn.GroupNorm(8, width), nn.Mish()
            )
            for at in range(levels)
        )
        self.sides = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(levels))
        self.head = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.PReLU(), nn.Conv2d(width, classes, 3, padding=1)
        )

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x, found = image, []
        for stage, side in zip(self.stages, self.sides, strict=True):
            x = stage(x)
            found.append(side(x))
        loss, above = 0, None
        for level in reversed(found):
            above = level if above is None else level + F.interpolate(above, size=level.shape[-2:], mode="nearest")
            logits = self.head(above).flatten(2)
            target = F.one_hot(label % logits.shape[1], logits.shape[1]).to(logits.dtype)[..., None].expand_as(logits)
            plain = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
            right = torch.where(target > 0.5, logits.sigmoid(), 1 - logits.sigmoid())
            loss = loss + ((1 - right) ** 2 * plain).mean()
        return loss
