//! The table of `size_rules.rs`, continued: recurrent and fused operators, `Einsum`, and the
//! operators of the domains `ai.onnx.ml` and `com.microsoft`.

use std::collections::BTreeMap;

use super::size_rules::{Rule, convolution, gemm, matmul, one, with_element};
use super::sizes::{Dims, Extent, FLOAT, INT32, INT64, Known, broadcast, replaced};

/// `TensorProto.STRING`.
const STRING: i32 = 8;

/// The rule of an operator; `None` if it gives values as large as its first input.
pub(super) fn further(operator: &str) -> Option<Rule> {
    several(operator).or_else(|| fused(operator)).or_else(|| quantised(operator)).or_else(|| classical(operator))
}

/// Operators of the standard domain that give several values, or sizes by a formula.
fn several(operator: &str) -> Option<Rule> {
    Some(match operator {
        "LSTM" | "GRU" | "RNN" => recurrent,
        "Einsum" => |k| k.made(Einsum::of(k)?.dims()?),
        "DepthToSpace" => |k| {
            let (&[n, c, h, w], block) = (k.dims(0)?, block(k)) else { return None };
            k.made([n, c / block.saturating_mul(block), h.saturating_mul(block), w.saturating_mul(block)])
        },
        "SpaceToDepth" => |k| {
            let (&[n, c, h, w], block) = (k.dims(0)?, block(k)) else { return None };
            k.made([n, c.saturating_mul(block.saturating_mul(block)), h / block, w / block])
        },
        // The mean and the deviation have one element for each group of normalised elements.
        "LayerNormalization" => |k| {
            let x = k.dims(0)?;
            let first = k.axis(-1, x.len())?;
            let of_each = || Extent::new(FLOAT, x.iter().enumerate().map(|(i, d)| if i < first { *d } else { 1 }));
            Some(vec![Extent::new(k.element(0), x.iter().copied()), of_each(), of_each()])
        },
        "StringNormalizer" => |k| match k.attribute("stopwords") {
            Some(words) if !words.strings.is_empty() => None,
            _ => one(same(k, STRING)?),
        },
        "GridSample" => |k| {
            let (&[n, c, ..], [_, places @ .., _]) = (k.dims(0)?, k.dims(1)?) else { return None };
            k.made([n, c].into_iter().chain(places.iter().copied()))
        },
        "Dropout" => |k| Some(vec![same(k, k.element(0))?, same(k, super::sizes::BOOL)?]),
        _ => return None,
    })
}

/// Operators into which ONNX Runtime fuses several others.
fn fused(operator: &str) -> Option<Rule> {
    Some(match operator {
        "FusedMatMul" => |k| {
            if k.int("transBatchA", 0) != 0 || k.int("transBatchB", 0) != 0 {
                return None;
            }
            let turned = |index: usize, attribute: &str| {
                let mut dims = Dims::from_slice(k.dims(index)?);
                let rank = dims.len();
                if k.int(attribute, 0) != 0 && rank > 1 {
                    dims.swap(rank - 1, rank - 2);
                }
                Some(dims)
            };
            matmul(&turned(0, "transA")?, &turned(1, "transB")?, k.element(0).max(FLOAT))
        },
        "FusedGemm" => |k| gemm(k, 1, k.element(0)),
        "FusedConv" => |k| convolution(k, k.dims(1)?),
        "SkipLayerNormalization" | "SkipSimplifiedLayerNormalization" => |k| {
            let unknown = || Extent { element: FLOAT, ..Extent::default() };
            Some(vec![same(k, k.element(0))?, unknown(), unknown(), same(k, k.element(0))?])
        },
        "EmbedLayerNormalization" => |k| {
            let (&[n, length], &[_, width]) = (k.dims(0)?, k.dims(2)?) else { return None };
            let embedded = || Extent::new(k.element(2), [n, length, width]);
            Some(vec![embedded(), Extent::new(INT32, [n]), embedded()])
        },
        // With the weights of all three projections as input 1, or with queries, keys and values.
        "Attention" | "QAttention" => |k| match (k.dims(0)?, k.dims(1)?) {
            (&[n, length, _], &[_, widths]) if k.attribute("qkv_hidden_sizes").is_none() => {
                one(Extent::new(FLOAT, [n, length, widths / 3]))
            }
            (query, key) if query.len() == key.len() && query.len() == 4 => {
                k.made(replaced(query, 3, *k.dims(2)?.get(3)?))
            }
            _ => None,
        },
        "MultiHeadAttention" => |k| {
            let (query @ &[_, _, _], &[_, _, width]) = (k.dims(0)?, k.dims(2)?) else { return None };
            k.made(replaced(query, 2, width))
        },
        "GroupQueryAttention" => |k| if k.has(1) { k.made(k.dims(0)?.iter().copied()) } else { None },
        "CDist" => |k| one(Extent::new(k.element(0), [*k.dims(0)?.first()?, *k.dims(1)?.first()?])),
        "MatMulNBits" => |k| {
            let x = k.dims(0)?;
            k.made(replaced(x, x.len().checked_sub(1)?, u64::try_from(k.int("N", 0)).ok()?))
        },
        _ => return None,
    })
}

/// Quantised operators of ONNX Runtime.
fn quantised(operator: &str) -> Option<Rule> {
    Some(match operator {
        "DynamicQuantizeMatMul" | "MatMulIntegerToFloat" => |k| matmul(k.dims(0)?, k.dims(1)?, FLOAT),
        "QLinearAdd" | "QLinearMul" => |k| k.made(broadcast(k.dims(0)?, k.dims(3)?)),
        "QLinearGlobalAveragePool" => |k| {
            let x = k.dims(0)?;
            let channels = if k.int("channels_last", 0) == 0 { 1 } else { x.len().checked_sub(1)? };
            k.made(x.iter().enumerate().map(|(i, d)| if i == 0 || i == channels { *d } else { 1 }))
        },
        "QLinearAveragePool" => |k| {
            if k.int("channels_last", 0) != 0 {
                return None;
            }
            let kernel = k.attribute("kernel_shape")?.ints.iter().map(|n| u64::try_from(*n).unwrap_or(0));
            let weight: Dims = [*k.dims(0)?.get(1)?, 0].into_iter().chain(kernel).collect();
            convolution(k, &weight)
        },
        // A scale and a zero point, then a tensor with its own, and so on.
        "QLinearConcat" => |k| {
            let first = k.dims(2)?;
            let along = k.axis(0, first.len())?;
            let tensors = (2..k.step.inputs.len()).step_by(3);
            let total = tensors
                .map(|i| k.dims(i)?.get(along).copied())
                .try_fold(0u64, |sum, d| Some(sum.saturating_add(d?)))?;
            one(Extent::new(k.element(2), replaced(first, along, total)))
        },
        _ => return None,
    })
}

/// Operators of classical machine learning.
fn classical(operator: &str) -> Option<Rule> {
    Some(match operator {
        "TreeEnsembleRegressor" | "TreeEnsemble" => |k| of_rows(k, FLOAT, k.int("n_targets", 1)),
        "LinearRegressor" => |k| of_rows(k, FLOAT, k.int("targets", 1)),
        "SVMRegressor" => |k| of_rows(k, FLOAT, 1),
        "TreeEnsembleClassifier" | "LinearClassifier" | "SVMClassifier" => |k| {
            let count = |name: &str| k.attribute(name).map_or(0, |a| a.ints.len().max(a.strings.len()));
            let (ints, int64s) = (count("classlabels_ints"), count("classlabels_int64s"));
            let classes = (ints.max(int64s)).max(count("classlabels_strings")).max(count("classlabels_strings_int64s"));
            let labels = Extent::new(if ints.max(int64s) > 0 { INT64 } else { STRING }, [rows(k)?]);
            // A support vector machine has a score for each pair of classes, or for each class.
            let scores = match k.attribute("vectors_per_class") {
                None if classes > 1 => Extent::new(FLOAT, [rows(k)?, classes as u64]),
                _ => Extent { element: FLOAT, ..Extent::default() },
            };
            Some(vec![labels, scores])
        },
        "OneHotEncoder" => |k| {
            let count = |name: &str| k.attribute(name).map_or(0, |a| a.ints.len().max(a.strings.len()));
            let categories = count("cats_int64s").max(count("cats_strings")) as u64;
            one(Extent::new(FLOAT, k.dims(0)?.iter().copied().chain([categories])))
        },
        "ArrayFeatureExtractor" => |k| {
            let (x, chosen) = (k.dims(0)?, super::sizes::product(k.dims(1)?));
            let before = x.get(..x.len().checked_sub(1)?)?;
            let one_row = before.is_empty().then_some(1);
            k.made(one_row.into_iter().chain(before.iter().copied()).chain([chosen]))
        },
        "FeatureVectorizer" => |k| {
            let widths = &k.attribute("inputdimensions")?.ints;
            of_rows(k, FLOAT, widths.iter().fold(0i64, |sum, n| sum.saturating_add(*n)))
        },
        "TfIdfVectorizer" => |k| {
            let most = k.attribute("ngram_indexes")?.ints.iter().max()?;
            let width = u64::try_from(*most).ok()?.checked_add(1)?;
            let &[n, _] = k.dims(0)? else { return one(Extent::new(FLOAT, [width])) };
            one(Extent::new(FLOAT, [n, width]))
        },
        "Scaler" => |k| with_element(FLOAT, k.made(k.dims(0)?.iter().copied())),
        _ => return None,
    })
}

fn same(k: &Known<'_>, element: i32) -> Option<Extent> {
    Some(Extent::new(element, k.dims(0)?.iter().copied()))
}

fn block(k: &Known<'_>) -> u64 {
    u64::try_from(k.int("blocksize", 1)).unwrap_or(1).max(1)
}

/// The first size of a matrix; a vector is one row.
fn rows(k: &Known<'_>) -> Option<u64> {
    match k.dims(0)? {
        [] => None,
        [_] => Some(1),
        [rows, ..] => Some(*rows),
    }
}

fn of_rows(k: &Known<'_>, element: i32, width: i64) -> Option<Vec<Extent>> {
    one(Extent::new(element, [rows(k)?, u64::try_from(width).ok()?]))
}

fn recurrent(k: &Known<'_>) -> Option<Vec<Extent>> {
    let (&[first, second, _], &[directions, _, hidden]) = (k.dims(0)?, k.dims(2)?) else { return None };
    let element = k.element(0);
    if k.int("layout", 0) == 0 {
        let state = || Extent::new(element, [directions, second, hidden]);
        return Some(vec![Extent::new(element, [first, directions, second, hidden]), state(), state()]);
    }
    let state = || Extent::new(element, [first, directions, hidden]);
    Some(vec![Extent::new(element, [first, second, directions, hidden]), state(), state()])
}

/// An equation of `Einsum` with one label for each axis. The axes for which `...` stands have
/// labels of their own.
pub(super) struct Einsum {
    /// The labels of each input.
    pub terms: Vec<Vec<Label>>,
    pub made: Vec<Label>,
    sizes: BTreeMap<Label, u64>,
}

/// An axis of an equation: a letter, or an axis for which `...` stands, counted from the last.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Label {
    Rest(usize),
    Letter(char),
}

impl Einsum {
    /// Reads the equation. `None` if it does not fit the inputs.
    pub fn of(k: &Known<'_>) -> Option<Einsum> {
        let equation = k.attribute("equation")?.s.clone()?;
        let equation: String = String::from_utf8_lossy(&equation).chars().filter(|c| !c.is_whitespace()).collect();
        let (left, right) = equation.split_once("->").map_or((equation.as_str(), None), |(l, r)| (l, Some(r)));
        let (mut terms, mut sizes, mut most) = (Vec::new(), BTreeMap::new(), 0);
        for (index, term) in left.split(',').enumerate() {
            let dims = k.dims(index)?;
            let letters = term.chars().filter(|c| *c != '.').count();
            let rest = if term.contains("...") { dims.len().checked_sub(letters)? } else { 0 };
            let labels = labels(term, rest);
            if labels.len() != dims.len() {
                return None;
            }
            for (label, dim) in labels.iter().zip(dims) {
                let size = sizes.entry(*label).or_insert(*dim);
                *size = (*size).max(*dim);
            }
            most = most.max(rest);
            terms.push(labels);
        }
        let made = match right {
            Some(right) => labels(right, most),
            // All axes of `...`, then the letters that occur once, in alphabetical order.
            None => {
                let once = |label: &Label| terms.iter().flatten().filter(|l| *l == label).count() == 1;
                let letters = sizes.keys().filter(|l| matches!(l, Label::Letter(_)) && once(l)).copied();
                (0..most).rev().map(Label::Rest).chain(letters).collect()
            }
        };
        Some(Einsum { terms, made, sizes })
    }

    fn dims(&self) -> Option<Dims> {
        self.made.iter().map(|label| self.sizes.get(label).copied()).collect()
    }
}

/// The labels of a term in which `...` stands for `rest` axes.
fn labels(term: &str, rest: usize) -> Vec<Label> {
    let (before, behind) = term.split_once("...").unwrap_or((term, ""));
    let rest = if term.contains("...") { rest } else { 0 };
    let letters = |part: &str| part.chars().map(Label::Letter).collect::<Vec<_>>();
    letters(before).into_iter().chain((0..rest).rev().map(Label::Rest)).chain(letters(behind)).collect()
}

#[cfg(test)]
mod tests {
    use crate::onnx::rows::sizes_of;

    /// The expected sizes are those of ONNX Runtime.
    #[test]
    fn sizes_are_those_of_a_run() {
        let cases: &[(&str, &[usize], &[u64])] = &[
            ("y=DepthToSpace(x) blocksize=2", &[2, 8, 3, 5], &[2, 2, 6, 10]),
            ("y=SpaceToDepth(x) blocksize=2", &[2, 2, 6, 10], &[2, 8, 3, 5]),
            ("w=f[1,8,3]; y=LSTM(x,w,w) layout=1", &[2, 5, 3], &[2, 5, 1, 3]),
            ("w=f[1,8,3]; z,y=LSTM(x,w,w) layout=1", &[2, 5, 3], &[2, 1, 3]),
            ("z,y=Split(x) axis=1", &[2, 5], &[2, 2]),
            ("z,y=LayerNormalization(x) axis=1", &[2, 5, 3], &[2, 1, 1]),
            ("y=Einsum(x,x) equation=\"...ij,...kj->...ik\"", &[2, 5, 3], &[2, 5, 5]),
            ("y=Einsum(x) equation=\"ba\"", &[2, 5], &[5, 2]),
            ("z,y=ml.TreeEnsembleClassifier(x) classlabels_int64s=0,1,2", &[2, 5], &[2, 3]),
            ("w=f[4,5]; y=ms.CDist(x,w)", &[2, 5], &[2, 4]),
            ("w=f[4,5]; y=ms.FusedMatMul(x,w) transB=1", &[2, 5], &[2, 4]),
            ("k=i(1,0,4); y=NonZero(k)", &[2, 5], &[1, 2]),
        ];
        for (text, input, expected) in cases {
            let made = sizes_of(&format!("x; {text}; -> y"), input);
            assert_eq!(made.as_deref(), Some(*expected), "{text} of {input:?}");
        }
    }
}
