//! Where Abacus cuts its models: at blocks, layers and modules.

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

/// The first of the operators that each of Abacus' begins with, and one past the last; operators that are not fused. A residual block is one of theirs, a module of Inception, a layer of BERT; of VGG each convolution and
/// each pool, and all that is fully connected. What comes before the first block and after the last are one each, but in BERT, and two before the first module of Inception.
///
/// # Errors
/// If it is none of [`ABACUS_MODELS`].
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
