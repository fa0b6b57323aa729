//! Tensors of any datatype, shape and content.

use bytes::Bytes;
use downbeat_core::tensor::DataType;
use proptest::collection::vec;
use proptest::prelude::*;

/// A datatype, a shape and data that fits it.
pub type Tensor = (DataType, Vec<i64>, Bytes);

/// Any tensor that the binary form can carry; BOOL bytes are 0 or 1.
pub fn any_tensor() -> impl Strategy<Value = Tensor> {
    (prop::sample::select(DataType::ALL.to_vec()), vec(0_i64..4, 0..4)).prop_flat_map(|(datatype, shape)| {
        let count = usize::try_from(shape.iter().product::<i64>()).unwrap();
        let data = match datatype.size() {
            Some(size) if datatype == DataType::Bool => vec(0_u8..2, count * size).boxed(),
            Some(size) => vec(any::<u8>(), count * size).boxed(),
            None => vec(vec(any::<u8>(), 0..20), count).prop_map(join).boxed(),
        };
        (Just(datatype), Just(shape), data.prop_map(Bytes::from))
    })
}

/// Any tensor that JSON can carry too: a NaN has the bits that a reader gives it, strings are text.
pub fn any_json_tensor() -> impl Strategy<Value = Tensor> {
    (prop::sample::select(DataType::ALL.to_vec()), vec(0_i64..4, 0..4)).prop_flat_map(|(datatype, shape)| {
        let count = usize::try_from(shape.iter().product::<i64>()).unwrap();
        let element: BoxedStrategy<Vec<u8>> = match datatype {
            DataType::Bool => any::<bool>().prop_map(|v| vec![u8::from(v)]).boxed(),
            DataType::Fp16 => floats(|b| half::f16::from_le_bytes(b).into(), |v| half::f16::from_f64(v).to_le_bytes()),
            DataType::Bf16 => {
                floats(|b| half::bf16::from_le_bytes(b).into(), |v| half::bf16::from_f64(v).to_le_bytes())
            }
            DataType::Fp32 => floats(|b| f32::from_le_bytes(b).into(), |v| (v as f32).to_le_bytes()),
            DataType::Fp64 => floats(f64::from_le_bytes, f64::to_le_bytes),
            DataType::Bytes => any::<String>().prop_map(|s| join(vec![s.into_bytes()])).boxed(),
            _ => vec(any::<u8>(), datatype.size().unwrap()).boxed(),
        };
        (Just(datatype), Just(shape), vec(element, count).prop_map(|elements| Bytes::from(elements.concat())))
    })
}

/// Finite numbers of any bits, and often an infinity or NaN.
fn floats<const SIZE: usize>(value: fn([u8; SIZE]) -> f64, bytes: fn(f64) -> [u8; SIZE]) -> BoxedStrategy<Vec<u8>>
where
    [u8; SIZE]: Arbitrary,
{
    let finite = any::<[u8; SIZE]>().prop_filter("finite", move |b| value(*b).is_finite());
    let others = prop::sample::select(vec![f64::INFINITY, f64::NEG_INFINITY, f64::NAN]).prop_map(bytes);
    prop_oneof![3 => finite, 1 => others].prop_map(|b| b.to_vec()).boxed()
}

fn join(elements: Vec<Vec<u8>>) -> Vec<u8> {
    elements
        .iter()
        .flat_map(|element| [&u32::try_from(element.len()).unwrap().to_le_bytes()[..], element].concat())
        .collect()
}
