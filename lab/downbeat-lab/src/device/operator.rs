//! One operator of a model: its computing and its memory traffic for one item.

/// The computing and the memory traffic of an operator for one item, before any device is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Operator {
    /// The operator's name, such as `convolution`.
    pub name: &'static str,
    /// Multiplications with an addition each.
    pub multiplications: u64,
    /// Whether the operator is a convolution. Other multiplications are products of matrices.
    pub convolution: bool,
    /// Whether Winograd's algorithm saves some multiplications: 3x3 convolutions of stride 1.
    pub winograd: bool,
    /// Elements that the operator reads, without weights.
    pub inputs: u64,
    /// Elements that the operator writes, in rows of [`Self::columns`].
    pub outputs: u64,
    /// Channels that the operator writes. Rows of all items make one matrix, columns of weights
    /// another.
    pub columns: u64,
    /// Elements of weights, which all items share.
    pub weights: u64,
}

impl Operator {
    /// Makes a product `[items * rows, inner] x [inner, columns]` with weights of
    /// `inner * columns`.
    pub fn matrix(name: &'static str, rows: u64, inner: u64, columns: u64) -> Self {
        Operator {
            name,
            multiplications: rows * inner * columns,
            convolution: false,
            winograd: false,
            inputs: rows * inner,
            outputs: rows * columns,
            columns,
            weights: inner * columns,
        }
    }

    /// Makes an operator that only moves data: it reads `inputs` and writes `outputs`.
    pub fn moving(name: &'static str, inputs: u64, outputs: u64) -> Self {
        let (multiplications, columns, weights) = (0, outputs, 0);
        Operator { name, multiplications, convolution: false, winograd: false, inputs, outputs, columns, weights }
    }
}
