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

/// Any tensor that JSON can carry too: numbers are finite, strings are text.
pub fn any_json_tensor() -> impl Strategy<Value = Tensor> {
    (prop::sample::select(DataType::ALL.to_vec()), vec(0_i64..4, 0..4)).prop_flat_map(|(datatype, shape)| {
        let count = usize::try_from(shape.iter().product::<i64>()).unwrap();
        let element: BoxedStrategy<Vec<u8>> = match datatype {
            DataType::Bool => any::<bool>().prop_map(|v| vec![u8::from(v)]).boxed(),
            DataType::Fp16 => finite(|b: [u8; 2]| half::f16::from_le_bytes(b).is_finite()),
            DataType::Bf16 => finite(|b: [u8; 2]| half::bf16::from_le_bytes(b).is_finite()),
            DataType::Fp32 => finite(|b: [u8; 4]| f32::from_le_bytes(b).is_finite()),
            DataType::Fp64 => finite(|b: [u8; 8]| f64::from_le_bytes(b).is_finite()),
            DataType::Bytes => any::<String>().prop_map(|s| join(vec![s.into_bytes()])).boxed(),
            _ => vec(any::<u8>(), datatype.size().unwrap()).boxed(),
        };
        (Just(datatype), Just(shape), vec(element, count).prop_map(|elements| Bytes::from(elements.concat())))
    })
}

fn finite<const SIZE: usize>(is_finite: fn([u8; SIZE]) -> bool) -> BoxedStrategy<Vec<u8>>
where
    [u8; SIZE]: Arbitrary,
{
    any::<[u8; SIZE]>().prop_filter("finite", move |b| is_finite(*b)).prop_map(|b| b.to_vec()).boxed()
}

fn join(elements: Vec<Vec<u8>>) -> Vec<u8> {
    elements
        .iter()
        .flat_map(|element| [&u32::try_from(element.len()).unwrap().to_le_bytes()[..], element].concat())
        .collect()
}
