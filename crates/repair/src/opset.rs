//! The operators of newer versions of the standard as operators of older versions, by the rules of
//! ONNX's own version converter.

use downbeat_engine::onnx::proto::{AttributeProto, NodeProto};
use prost::Message;

/// The newest version of the standard's operators that all engines have.
pub(crate) const NEWEST: i64 = 26;
/// The newest version of the standard's operators that this crate knows.
pub(crate) const KNOWN: i64 = 28;
/// The newest version of the operators of classical machine learning that engines have.
pub(crate) const NEWEST_ML: i64 = 5;

/// How an operator of the newest known version becomes one of version [`NEWEST`].
enum Rule {
    /// The new version has this attribute in addition, which changes no answer of the types that
    /// the old version has.
    Without(&'static str),
    /// The new version has this attribute in addition. With this value, or without the attribute,
    /// both operators give the same answers.
    Only(&'static str, &'static str),
    /// The old versions lack the operator.
    New(i64),
}

/// The rule of an operator of version `version`; `None`: the operator of version [`NEWEST`] is the
/// same, or has fewer datatypes. An engine refuses a datatype that its operator lacks.
fn rule(op_type: &str, version: i64) -> Option<Rule> {
    let rule = match op_type {
        "Range" => Rule::Without("stash_type"),
        "CausalConvWithState" | "LinearAttention" => Rule::New(27),
        "SpaceToDepth" if version >= 28 => Rule::Only("mode", "DCR"),
        "SwiGLU" if version >= 28 => Rule::New(28),
        _ => return None,
    };
    Some(rule)
}

/// Whether newer operators of this kind may differ from version [`NEWEST`].
pub(crate) fn changes(op_type: &[u8]) -> bool {
    std::str::from_utf8(op_type).is_ok_and(|op_type| rule(op_type, KNOWN).is_some())
}

/// Turns an operator of version `version` into one of version [`NEWEST`]. Returns whether the
/// operator has changed.
///
/// # Errors
/// In words: there is no such operator in the old version.
pub(crate) fn lower(node: &mut NodeProto, version: i64) -> Result<bool, String> {
    let Some(rule) = rule(&node.op_type, version) else { return Ok(false) };
    let named = if node.name.is_empty() { String::new() } else { format!(" ('{}')", node.name) };
    let refuse = |what: String| {
        Err(format!(
            "its operator {}{named} {what}, and engines have the operators up to version {NEWEST}. Export it with an older \
             version, for example opset_version=20 or target_opset=20",
            node.op_type
        ))
    };
    let (name, only) = match rule {
        Rule::New(since) => return refuse(format!("came with version {since} of the ONNX operators")),
        Rule::Without(name) => (name, None),
        Rule::Only(name, value) => (name, Some(value)),
    };
    let attributes = node.attribute.iter().map(|bytes| AttributeProto::decode(bytes.clone()));
    let attributes = attributes.collect::<Result<Vec<_>, _>>();
    let attributes =
        attributes.map_err(|e| format!("an attribute of operator {}{named} cannot be read: {e}", node.op_type))?;
    let Some(index) = attributes.iter().position(|attribute| attribute.name == name) else { return Ok(false) };
    let value = attributes.get(index).and_then(|attribute| attribute.s.as_deref()).unwrap_or_default();
    if only.is_some_and(|only| value != only.as_bytes()) {
        let value = String::from_utf8_lossy(value).into_owned();
        return refuse(format!("has {name} = \"{value}\", which came with version {version} of the ONNX operators"));
    }
    node.attribute.remove(index);
    Ok(true)
}
