//! Convolutional networks as lists of operators.

use super::operator::Operator;

/// The pointwise operators after a convolution.
#[derive(Clone, Copy, PartialEq, Eq)]
enum After {
    /// Normalisation or bias.
    Normalise,
    /// Normalisation or bias, and an activation.
    Activate,
    /// Normalisation or bias, the addition of a shortcut, and an activation.
    AddAndActivate,
}

/// The list of operators as it grows, and the current square picture of `side` with `channels`.
struct Builder {
    operators: Vec<Operator>,
    fused: bool,
    side: u64,
    channels: u64,
}

impl Builder {
    fn new(side: u64, fused: bool) -> Self {
        Builder { operators: Vec::new(), fused, side, channels: 3 }
    }

    fn outputs(&self) -> u64 {
        self.side * self.side * self.channels
    }

    /// Adds a convolution to `channels` with a kernel of `height` x `width` and `stride`.
    fn shaped(&mut self, channels: u64, (height, width): (u64, u64), stride: u64, after: After) {
        let inputs = self.outputs();
        let weights = self.channels * channels * height * width;
        self.side = self.side.div_ceil(stride);
        self.channels = channels;
        let (pixels, outputs) = (self.side * self.side, self.outputs());
        let shortcut = if after == After::AddAndActivate { outputs } else { 0 };
        self.operators.push(Operator {
            name: "convolution",
            multiplications: pixels * weights,
            convolution: true,
            winograd: (height, width, stride) == (3, 3, 1),
            inputs: inputs + if self.fused { shortcut } else { 0 },
            outputs,
            columns: channels,
            weights,
        });
        if self.fused {
            return;
        }
        self.operators.push(Operator::moving("normalise", outputs, outputs));
        if after == After::AddAndActivate {
            self.operators.push(Operator::moving("add", 2 * outputs, outputs));
        }
        if after != After::Normalise {
            self.operators.push(Operator::moving("activate", outputs, outputs));
        }
    }

    fn square(&mut self, channels: u64, size: u64, stride: u64, after: After) {
        self.shaped(channels, (size, size), stride, after);
    }

    fn pool(&mut self, stride: u64) {
        let inputs = self.outputs();
        self.side = self.side.div_ceil(stride);
        self.operators.push(Operator::moving("pool", inputs, self.outputs()));
    }

    /// Doubles the side by a transposed convolution.
    fn grow(&mut self, channels: u64, size: u64) {
        let (inputs, pixels) = (self.outputs(), self.side * self.side);
        let weights = self.channels * channels * size * size;
        self.side *= 2;
        self.channels = channels;
        let outputs = self.outputs();
        let operator = Operator {
            name: "transposed",
            multiplications: pixels * weights,
            convolution: true,
            winograd: false,
            inputs,
            outputs,
            columns: channels,
            weights,
        };
        self.operators.push(operator);
    }

    /// Adds branches, each a list of kernels with their channels, and joins their outputs.
    fn branches(&mut self, stride: u64, pooled: u64, branches: &[&[(u64, (u64, u64))]]) {
        let (side, channels) = (self.side, self.channels);
        let mut joined = pooled;
        for branch in branches {
            (self.side, self.channels) = (side, channels);
            for (index, (outputs, kernel)) in branch.iter().enumerate() {
                let stride = if index + 1 == branch.len() { stride } else { 1 };
                self.shaped(*outputs, *kernel, stride, After::Activate);
            }
            joined += self.channels;
        }
        (self.side, self.channels) = (side, channels);
        self.pool(stride);
        self.channels = joined;
        if !self.fused {
            let outputs = self.outputs();
            self.operators.push(Operator::moving("join", outputs, outputs));
        }
    }

    /// Adds a convolution of each channel by itself, with a 3x3 kernel.
    fn depthwise(&mut self, stride: u64) {
        let inputs = self.outputs();
        self.side = self.side.div_ceil(stride);
        let (outputs, columns) = (self.outputs(), self.channels);
        let weights = 9 * columns;
        let operator = Operator::moving("depthwise", inputs, outputs);
        self.operators.push(Operator { multiplications: 9 * outputs, convolution: true, columns, weights, ..operator });
        if !self.fused {
            self.operators.push(Operator::moving("normalise", outputs, outputs));
            self.operators.push(Operator::moving("activate", outputs, outputs));
        }
    }

    fn dense(&mut self, outputs: u64) {
        let inputs = self.outputs();
        (self.side, self.channels) = (1, outputs);
        self.operators.push(Operator::matrix("dense", 1, inputs, outputs));
    }
}

/// ResNet with these numbers of bottlenecks (He et al. 2016), stride in the 3x3 convolution,
/// 224x224.
pub fn resnet(blocks: [u32; 4], fused: bool) -> Vec<Operator> {
    let mut net = Builder::new(224, fused);
    net.square(64, 7, 2, After::Activate);
    net.pool(2);
    for (level, count) in blocks.into_iter().enumerate() {
        let width = 64 << level;
        for block in 0..count {
            let stride = if level > 0 && block == 0 { 2 } else { 1 };
            if block == 0 {
                let (side, channels) = (net.side, net.channels);
                net.square(4 * width, 1, stride, After::Normalise);
                (net.side, net.channels) = (side, channels);
            }
            net.square(width, 1, 1, After::Activate);
            net.square(width, 3, stride, After::Activate);
            net.square(4 * width, 1, 1, After::AddAndActivate);
        }
    }
    net.pool(7);
    net.dense(1000);
    net.operators
}

/// VGG (Simonyan and Zisserman 2015), 224x224.
pub fn vgg(convolutions: [u32; 5], fused: bool) -> Vec<Operator> {
    let mut net = Builder::new(224, fused);
    for (level, count) in convolutions.into_iter().enumerate() {
        for _ in 0..count {
            net.square((64 << level).min(512), 3, 1, After::Activate);
        }
        net.pool(2);
    }
    net.dense(4096);
    net.dense(4096);
    net.dense(1000);
    net.operators
}

/// AlexNet in one tower (Krizhevsky 2014), 224x224.
pub fn alexnet(fused: bool) -> Vec<Operator> {
    let mut net = Builder::new(224, fused);
    net.square(64, 11, 4, After::Activate);
    net.pool(2);
    net.square(192, 5, 1, After::Activate);
    net.pool(2);
    for channels in [384, 256, 256] {
        net.square(channels, 3, 1, After::Activate);
    }
    net.pool(2);
    // Borders are cut in the original.
    net.side = 6;
    net.dense(4096);
    net.dense(4096);
    net.dense(1000);
    net.operators
}

/// MobileNet (Howard et al. 2017), 224x224, of full width.
pub fn mobilenet(fused: bool) -> Vec<Operator> {
    let mut net = Builder::new(224, fused);
    net.square(32, 3, 2, After::Activate);
    let blocks = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)];
    let last = [(512, 1), (512, 1), (512, 1), (512, 1), (512, 1), (1024, 2), (1024, 1)];
    for (channels, stride) in blocks.into_iter().chain(last) {
        net.depthwise(stride);
        net.square(channels, 1, 1, After::Activate);
    }
    net.pool(7);
    net.dense(1000);
    net.operators
}

/// Inception-v3 (Szegedy et al. 2016), 299x299, without the side exit; borders are padded where the
/// original cuts them.
pub fn inception_v3(fused: bool) -> Vec<Operator> {
    let mut net = Builder::new(299, fused);
    net.square(32, 3, 2, After::Activate);
    net.square(32, 3, 1, After::Activate);
    net.square(64, 3, 1, After::Activate);
    net.side = 147;
    net.pool(2);
    net.side = 73;
    net.square(80, 1, 1, After::Activate);
    net.square(192, 3, 1, After::Activate);
    net.side = 71;
    net.pool(2);
    net.side = 35;
    for pooled in [32, 64, 64] {
        let (wide, long) = ([(48, (1, 1)), (64, (5, 5))], [(64, (1, 1)), (96, (3, 3)), (96, (3, 3))]);
        net.branches(1, 0, &[&[(64, (1, 1))], &wide, &long, &[(pooled, (1, 1))]]);
    }
    net.branches(2, 288, &[&[(384, (3, 3))], &[(64, (1, 1)), (96, (3, 3)), (96, (3, 3))]]);
    net.side = 17;
    for width in [128, 160, 160, 192] {
        let long = [(width, (1, 1)), (width, (7, 1)), (width, (1, 7)), (width, (7, 1)), (192, (1, 7))];
        let short = [(width, (1, 1)), (width, (1, 7)), (192, (7, 1))];
        net.branches(1, 0, &[&long, &short, &[(192, (1, 1))], &[(192, (1, 1))]]);
    }
    let reduced = [(192, (1, 1)), (192, (1, 7)), (192, (7, 1)), (192, (3, 3))];
    net.branches(2, 768, &[&[(192, (1, 1)), (320, (3, 3))], &reduced]);
    net.side = 8;
    for _ in 0..2 {
        // The pairs of 1x3 and 3x1 to 384 channels each are written as one to 768.
        let (long, short) = ([(448, (1, 1)), (384, (3, 3)), (768, (1, 3))], [(384, (1, 1)), (768, (1, 3))]);
        net.branches(1, 0, &[&long, &short, &[(320, (1, 1))], &[(192, (1, 1))]]);
    }
    net.pool(8);
    net.dense(1000);
    net.operators
}

/// Inception-v4 (Szegedy et al. 2017), 299x299; borders are padded where the original cuts them.
pub fn inception_v4(fused: bool) -> Vec<Operator> {
    let mut net = Builder::new(299, fused);
    net.square(32, 3, 2, After::Activate);
    net.square(32, 3, 1, After::Activate);
    net.square(64, 3, 1, After::Activate);
    net.side = 147;
    net.branches(2, 64, &[&[(96, (3, 3))]]);
    net.branches(1, 0, &[&[(64, (1, 1)), (96, (3, 3))], &[(64, (1, 1)), (64, (7, 1)), (64, (1, 7)), (96, (3, 3))]]);
    net.branches(2, 192, &[&[(192, (3, 3))]]);
    net.side = 35;
    for _ in 0..4 {
        let (long, short, one) =
            ([(64, (1, 1)), (96, (3, 3)), (96, (3, 3))], [(64, (1, 1)), (96, (3, 3))], [(96, (1, 1))]);
        net.branches(1, 0, &[&long, &short, &one, &one]);
    }
    net.branches(2, 384, &[&[(384, (3, 3))], &[(192, (1, 1)), (224, (3, 3)), (256, (3, 3))]]);
    net.side = 17;
    for _ in 0..7 {
        let long = [(192, (1, 1)), (192, (1, 7)), (224, (7, 1)), (224, (1, 7)), (256, (7, 1))];
        let short = [(192, (1, 1)), (224, (1, 7)), (256, (7, 1))];
        net.branches(1, 0, &[&long, &short, &[(384, (1, 1))], &[(128, (1, 1))]]);
    }
    let reduced = [(256, (1, 1)), (256, (1, 7)), (320, (7, 1)), (320, (3, 3))];
    net.branches(2, 1024, &[&[(192, (1, 1)), (192, (3, 3))], &reduced]);
    net.side = 8;
    for _ in 0..3 {
        // The pairs of 1x3 and 3x1 to 256 channels each are written as one to 512.
        let long = [(384, (1, 1)), (448, (1, 3)), (512, (3, 1)), (512, (1, 3))];
        let short = [(384, (1, 1)), (512, (1, 3))];
        net.branches(1, 0, &[&long, &short, &[(256, (1, 1))], &[(256, (1, 1))]]);
    }
    net.pool(8);
    net.dense(1000);
    net.operators
}

/// U-Net (Ronneberger et al. 2015) of four levels, 64 channels at the top, with padded borders.
pub fn unet(side: u64, fused: bool) -> Vec<Operator> {
    let mut net = Builder::new(side, fused);
    for level in 0..5u64 {
        if level > 0 {
            net.pool(2);
        }
        net.square(64 << level, 3, 1, After::Activate);
        net.square(64 << level, 3, 1, After::Activate);
    }
    for level in (0..4u64).rev() {
        net.grow(64 << level, 2);
        // The output of the way down at this level is concatenated with the grown output.
        net.channels *= 2;
        net.square(64 << level, 3, 1, After::Activate);
        net.square(64 << level, 3, 1, After::Activate);
    }
    net.square(2, 1, 1, After::Normalise);
    net.operators
}

/// LinkNet (Chaurasia and Culurciello 2017) with ResNet18 as its encoder.
pub fn linknet(side: u64, fused: bool) -> Vec<Operator> {
    let mut net = Builder::new(side, fused);
    net.square(64, 7, 2, After::Activate);
    net.pool(2);
    for level in 0..4u64 {
        for block in 0..2 {
            net.square(64 << level, 3, if level > 0 && block == 0 { 2 } else { 1 }, After::Activate);
            net.square(64 << level, 3, 1, After::AddAndActivate);
        }
    }
    for outputs in [256, 128, 64] {
        let narrow = net.channels / 4;
        net.square(narrow, 1, 1, After::Activate);
        net.grow(narrow, 3);
        net.square(outputs, 1, 1, After::AddAndActivate);
    }
    net.square(16, 1, 1, After::Activate);
    net.square(64, 1, 1, After::Activate);
    net.grow(32, 3);
    net.square(32, 3, 1, After::Activate);
    net.grow(2, 2);
    net.operators
}
