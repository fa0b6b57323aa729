//! BERT's encoder as a list of operators.

use super::operator::Operator;

/// Returns `layers` layers of `width` channels for `length` tokens, with the four-fold feed-forward
/// part. Where operators are `fused`, a product includes the biases, activations and normalisations
/// after it, and attention's products include its scaling and softmax.
pub fn bert(layers: u32, width: u64, length: u64, fused: bool) -> Vec<Operator> {
    let (heads, hidden) = (width / 64, length * width);
    let mut operators = vec![Operator::moving("embed", 3 * hidden, hidden)];
    let point = |operators: &mut Vec<Operator>, name, inputs, outputs| {
        if !fused {
            operators.push(Operator::moving(name, inputs, outputs));
        }
    };
    for _ in 0..layers {
        operators.push(Operator::matrix("query_key_value", length, width, 3 * width));
        point(&mut operators, "bias", 3 * hidden, 3 * hidden);
        let scores = heads * length * length;
        let attention = |name, inputs, outputs, columns| Operator {
            multiplications: length * length * width,
            columns,
            ..Operator::moving(name, inputs, outputs)
        };
        operators.push(attention("scores", 2 * hidden, scores, length));
        point(&mut operators, "softmax", scores, scores);
        operators.push(attention("context", scores + hidden, hidden, 64));
        operators.push(Operator::matrix("projection", length, width, width));
        operators.push(Operator::moving("normalise", 2 * hidden, hidden));
        operators.push(Operator::matrix("feed_forward_up", length, width, 4 * width));
        point(&mut operators, "gelu", 4 * hidden, 4 * hidden);
        operators.push(Operator::matrix("feed_forward_down", length, 4 * width, width));
        operators.push(Operator::moving("normalise", 2 * hidden, hidden));
    }
    operators.push(Operator::matrix("pooler", 1, width, width));
    operators.push(Operator::matrix("classifier", 1, width, 2));
    operators
}
