//! Model files that the server does not run. Example: beside the error that `model.onnx` does not exist, a user
//! reads that `model.pt` is a PyTorch model.

use std::path::Path;

use downbeat_core::pages::Pointer;

/// Endings of model files, and the programs that the files come from.
const KINDS: [(&str, &str); 17] = [
    ("bst", "an XGBoost model"),
    ("cbm", "a CatBoost model"),
    ("engine", "a TensorRT plan"),
    ("gguf", "a llama.cpp model"),
    ("graphdef", "a TensorFlow model"),
    ("h5", "a Keras model"),
    ("joblib", "a pickled model"),
    ("keras", "a Keras model"),
    ("pb", "a TensorFlow model"),
    ("pkl", "a pickled model"),
    ("plan", "a TensorRT plan"),
    ("pt", "a PyTorch model"),
    ("pth", "a PyTorch model"),
    ("py", "a Python model"),
    ("safetensors", "a file of weights without a graph"),
    ("savedmodel", "a TensorFlow model"),
    ("tflite", "a LiteRT model"),
];

/// The kind of a file's model, if the server knows the kind and does not run it.
pub(crate) fn kind(name: &str) -> Option<&'static str> {
    let extension = Path::new(name).extension()?.to_str()?;
    KINDS.iter().find(|(ending, _)| extension.eq_ignore_ascii_case(ending)).map(|(_, kind)| *kind)
}

/// The remedy where a folder has a model of another kind in place of an ONNX file.
pub(crate) fn remedy(names: &[String]) -> Option<String> {
    let (name, kind) = names.iter().find_map(|name| Some((name, kind(name)?)))?;
    let page = Pointer::OTHER_MODELS;
    Some(format!("; {name} is {kind}, and Downbeat runs ONNX models: convert the model ({page})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_of_other_programs_are_named_and_other_files_are_not() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let said = remedy(&names(&["labels.txt", "model.PT"])).unwrap();
        assert!(said.starts_with("; model.PT is a PyTorch model, and Downbeat runs ONNX models"), "{said}");
        assert_eq!(remedy(&names(&["labels.txt", "model", "weights.bin", "net.onnx"])), None);
    }
}
