//! The checks that every engine makes of a batch before it reads the bytes.

use downbeat_core::tensor::{DataType, TensorSpec};

use crate::tensor::Tensor;
use crate::tensor::strings;

/// Checks a batch against the inputs of the model or the tensors between two segments. It checks
/// the count, datatypes, ranks, fixed sizes and the number of bytes. The last check makes it sound
/// to give an engine a pointer to the bytes.
#[inline]
pub fn check(specs: &[TensorSpec], tensors: &[Tensor]) -> Result<(), String> {
    if tensors.len() != specs.len() {
        return Err(format!("expected {} inputs, got {}", specs.len(), tensors.len()));
    }
    specs.iter().zip(tensors).try_for_each(|(spec, tensor)| check_one(spec, tensor))
}

#[inline]
fn check_one(spec: &TensorSpec, tensor: &Tensor) -> Result<(), String> {
    let name = &spec.name;
    if tensor.datatype != spec.datatype {
        return Err(format!("input '{name}': expected datatype {}, got {}", spec.datatype, tensor.datatype));
    }
    let fits = |(expected, got): (&i64, &usize)| *expected < 0 || u64::try_from(*expected) == Ok(*got as u64);
    if tensor.shape.len() != spec.dims.len() || !spec.dims.iter().zip(&tensor.shape).all(fits) {
        return Err(format!("input '{name}': expected shape {:?}, got {:?}", spec.dims, tensor.shape));
    }
    // Every size must fit into an i64, the type that engines take.
    let elements = tensor.elements().filter(|n| i64::try_from(*n).is_ok());
    let Some(elements) = elements.filter(|_| tensor.shape.iter().all(|d| i64::try_from(*d).is_ok())) else {
        return Err(format!("input '{name}': shape {:?} is larger than memory", tensor.shape));
    };
    let len = tensor.data.len();
    match tensor.datatype.size() {
        Some(size) if elements.checked_mul(size) != Some(len) => Err(format!(
            "input '{name}': shape {:?} of {} takes {} bytes, got {len}",
            tensor.shape,
            tensor.datatype,
            elements.saturating_mul(size)
        )),
        Some(_) => Ok(()),
        None => check_strings(name, elements, tensor.data.as_slice()),
    }
}

fn check_strings(name: &str, elements: usize, bytes: &[u8]) -> Result<(), String> {
    let mut count = 0usize;
    for string in strings::split(bytes) {
        string.map_err(|e| format!("input '{name}': {e}"))?;
        count += 1;
    }
    if count == elements { Ok(()) } else { Err(format!("input '{name}': expected {elements} strings, got {count}")) }
}

/// Makes every byte of a `BOOL` tensor 0 or 1: engines read them as C++ `bool`, where any other
/// value is undefined.
#[inline]
pub fn normalise_booleans(tensor: &mut Tensor) {
    if tensor.datatype == DataType::Bool && tensor.data.as_slice().iter().any(|b| *b > 1) {
        tensor.data.as_mut_slice().iter_mut().for_each(|b| *b = u8::from(*b != 0));
    }
}
