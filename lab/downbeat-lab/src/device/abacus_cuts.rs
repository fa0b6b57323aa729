//! The places where Abacus cuts its models: at blocks, layers and modules.

use super::architecture::Architecture;
use super::failure::{DeviceFailure, named};

/// Abacus' models (table 1).
pub const ABACUS_MODELS: [Architecture; 7] = [
    Architecture::ResNet50,
    Architecture::ResNet101,
    Architecture::ResNet152,
    Architecture::InceptionV3,
    Architecture::Vgg16,
    Architecture::Vgg19,
    Architecture::BertBase,
];

/// Returns the index of the first operator of each of Abacus' operators, and one past the last.
/// Indices count the operators of the unfused network.
///
/// A residual block is one operator of Abacus, and so is a module of Inception or a layer of BERT.
/// VGG has one for each convolution and each pool, and one for all fully connected layers. The part
/// before the first block and the part after the last are one operator each. In BERT both belong to
/// the neighbouring layer, and Inception has two operators before its first module.
///
/// # Errors
/// If the architecture is none of [`ABACUS_MODELS`].
pub fn abacus_cuts(architecture: Architecture) -> Result<Vec<usize>, DeviceFailure> {
    named("model of Abacus", ABACUS_MODELS, Architecture::name, architecture.name())?;
    let operators = architecture.operators(false, 1);
    let names: Vec<&str> = operators.iter().map(|operator| operator.name).collect();
    let is_first_of = |index: usize, name: &str| names[index] == name && names[index - 1] != name;
    let begins = |index: &usize| {
        let (index, before) = (*index, names[*index - 1]);
        match architecture {
            Architecture::BertBase => before == "normalise" && names[index] == "query_key_value",
            Architecture::InceptionV3 => {
                let in_stem = !names[..index].contains(&"join");
                before == "join" || before == "pool" && in_stem && names[index] == "convolution"
            }
            Architecture::Vgg16 | Architecture::Vgg19 => {
                matches!(names[index], "convolution" | "pool") || is_first_of(index, "dense")
            }
            _ => before == "activate" && names[index - 2] == "add" || before == "pool" && names[index] != "dense",
        }
    };
    let cuts = (2..names.len()).filter(begins);
    Ok([0].into_iter().chain(cuts).chain([names.len()]).collect())
}
