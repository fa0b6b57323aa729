//! One operator of a model: what there is to compute and to move, for one item.

/// What an operator computes and moves for one item, before any device is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Operator {
    /// What it is, such as `conv3x3`.
    pub name: &'static str,
    /// Multiplications with an addition each.
    pub multiplications: u64,
    /// Whether Winograd's algorithm saves some of them: 3x3 convolutions of stride 1.
    pub winograd: bool,
    /// Elements that it reads, weights apart.
    pub inputs: u64,
    /// Elements that it writes, in rows of [`Self::columns`].
    pub outputs: u64,
    /// Channels that it writes: rows of all items make one matrix, columns of weights another.
    pub columns: u64,
    /// Elements of weights, which all items share.
    pub weights: u64,
}

impl Operator {
    /// `[items * rows, inner] x [inner, columns]` with weights of `inner * columns`.
    pub fn matrix(name: &'static str, rows: u64, inner: u64, columns: u64) -> Self {
        Operator {
            name,
            multiplications: rows * inner * columns,
            winograd: false,
            inputs: rows * inner,
            outputs: rows * columns,
            columns,
            weights: inner * columns,
        }
    }

    /// One that only moves: reads `inputs`, writes `outputs`.
    pub fn moving(name: &'static str, inputs: u64, outputs: u64) -> Self {
        Operator { name, multiplications: 0, winograd: false, inputs, outputs, columns: outputs, weights: 0 }
    }
}
