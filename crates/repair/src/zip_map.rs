//! `ZipMap`: turns a tensor of scores into a list of maps from class to score, which no protocol
//! has. The tensor itself is served in place of the list, with the classes as its labels.

use downbeat_engine::onnx::proto::{AttributeProto, NodeProto, ValueInfoProto, shaped_type};
use prost::Message;

use crate::outline::ML;

/// `TensorProto.DataType` of scores, unless the file names another.
const FLOAT: i32 = 1;

/// Whether the operator is a `ZipMap`.
pub(crate) fn is(node: &NodeProto) -> bool {
    node.op_type == "ZipMap" && node.domain == ML && node.input.len() == 1 && node.output.len() == 1
}

/// The operator that gives the tensor of scores the name of the list.
pub(crate) fn identity(node: &NodeProto) -> NodeProto {
    NodeProto {
        input: node.input.clone(),
        output: node.output.clone(),
        name: node.name.clone(),
        op_type: "Identity".to_owned(),
        ..NodeProto::default()
    }
}

/// The output with the type of the scores of `classes` classes. `element` is their datatype.
pub(crate) fn output(name: &str, element: i32, classes: usize) -> Vec<u8> {
    let classes = i64::try_from(classes).unwrap_or(-1);
    let element = if element == 0 { FLOAT } else { element };
    let r#type = Some(shaped_type(element, &[-1, classes]).encode_to_vec().into());
    ValueInfoProto { name: name.to_owned(), r#type }.encode_to_vec()
}

/// The classes of a `ZipMap`, as text.
///
/// # Errors
/// In words, if an attribute cannot be read or there are no classes.
pub(crate) fn classes(node: &NodeProto) -> Result<Vec<String>, String> {
    for bytes in &node.attribute {
        let attribute = AttributeProto::decode(bytes.clone())
            .map_err(|e| format!("an attribute of operator ZipMap cannot be read: {e}. Export it again"))?;
        match attribute.name.as_str() {
            "classlabels_int64s" if !attribute.ints.is_empty() => {
                return Ok(attribute.ints.iter().map(i64::to_string).collect());
            }
            "classlabels_strings" if !attribute.strings.is_empty() => {
                let text = |bytes: &prost::bytes::Bytes| String::from_utf8_lossy(bytes).into_owned();
                return Ok(attribute.strings.iter().map(text).collect());
            }
            _ => {}
        }
    }
    Err("its operator ZipMap has no classes; the file is corrupt. Export it again, with the option zipmap=False"
        .to_owned())
}
