//! `StringNormalizer`: changes the case of letters by the rules of a locale. onnxruntime refuses the
//! operator on machines without `en_US`, which is the default. `C.UTF-8` has the same rules, and
//! each machine has that locale.

use downbeat_engine::onnx::proto::{AttributeProto, NodeProto};
use prost::Message;

const LOCALE: &str = "C.UTF-8";

/// Sets the locale of a `StringNormalizer`, if its locale is the default or English. Returns
/// whether the operator has changed.
pub(crate) fn set_locale(node: &mut NodeProto) -> bool {
    let mut kept = Vec::with_capacity(node.attribute.len() + 1);
    for bytes in &node.attribute {
        // An attribute that cannot be read is the engine's to refuse.
        let Ok(attribute) = AttributeProto::decode(bytes.clone()) else { return false };
        if attribute.name != "locale" {
            kept.push(bytes.clone());
            continue;
        }
        let locale = attribute.s.unwrap_or_default();
        if !(locale.is_empty() || locale.starts_with(b"en_US")) {
            return false;
        }
    }
    kept.push(AttributeProto::text("locale", LOCALE).encode_to_vec().into());
    node.attribute = kept;
    true
}
