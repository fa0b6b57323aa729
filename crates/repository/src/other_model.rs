//! Models of other formats. Example: beside the error that `model.onnx` does not exist, a user reads
//! that `model.pt` is a PyTorch model, and how it becomes an ONNX file.

use std::fmt;
use std::path::Path;

use downbeat_core::pages::Pointer;

/// A format of models that the server does not run.
#[derive(Debug)]
pub(crate) struct OtherModel {
    /// The endings of its files.
    endings: &'static [&'static str],
    kind: &'static str,
    /// How its models become ONNX files.
    way: &'static str,
}

const fn other(endings: &'static [&'static str], kind: &'static str, way: &'static str) -> OtherModel {
    OtherModel { endings, kind, way }
}

const OTHERS: [OtherModel; 17] = [
    other(
        &["pt", "pth", "ckpt"],
        "a PyTorch model",
        "in Python: torch.onnx.export(model, example_inputs, \"model.onnx\")",
    ),
    other(
        &["pt2"],
        "an exported PyTorch program",
        "in Python: torch.onnx.export(torch.export.load(\"FILE\"), f=\"model.onnx\")",
    ),
    other(&["safetensors"], "a file of weights without a graph", "type: optimum-cli export onnx --model FOLDER OUTPUT"),
    other(
        &["pkl", "pickle", "joblib"],
        "a pickled model",
        "in Python, for scikit-learn: skl2onnx.to_onnx(model, X[:1]).SerializeToString() is the content of model.onnx",
    ),
    other(
        &["keras", "h5", "hdf5"],
        "a Keras model",
        "in Python: model = keras.saving.load_model(\"FILE\"), call the model once, and then \
         model.export(\"model.onnx\", format=\"onnx\")",
    ),
    other(
        &["pb", "savedmodel"],
        "a TensorFlow model",
        "type: python -m tf2onnx.convert --saved-model FOLDER --output model.onnx",
    ),
    other(
        &["graphdef"],
        "a frozen TensorFlow graph",
        "type: python -m tf2onnx.convert --graphdef FILE --inputs NAME:0 --outputs NAME:0 --output model.onnx",
    ),
    other(&["tflite"], "a LiteRT model", "type: python -m tf2onnx.convert --tflite FILE --output model.onnx"),
    other(&["bst", "ubj", "xgb"], "an XGBoost model", "in Python: onnxmltools.convert_xgboost"),
    other(&["lgb"], "a LightGBM model", "in Python: onnxmltools.convert_lightgbm"),
    other(&["cbm"], "a CatBoost model", "in Python: model.save_model(\"model.onnx\", format=\"onnx\")"),
    other(
        &["engine", "plan"],
        "a TensorRT plan for one kind of GPU",
        "serve the ONNX file of the model, with --engine tensorrt",
    ),
    other(&["mlmodel", "mlpackage"], "a Core ML model", "export the model from the framework that it was made with"),
    other(&["ort"], "a model in ONNX Runtime's own format", "serve the .onnx file of the model"),
    other(&["gguf"], "a llama.cpp model", "this format holds a language model for other servers"),
    other(&["py"], "Python code", "write backend: \"python\" in config.pbtxt if the code is a model"),
    other(&["zip", "gz", "tgz", "tar"], "an archive", "unpack the archive, and serve the folder"),
];

impl OtherModel {
    /// The format of a file, by its name; `None`: not a format that the server knows and does not
    /// run.
    pub(crate) fn of(name: &str) -> Option<&'static Self> {
        let ending = Path::new(name).extension()?.to_str()?.to_ascii_lowercase();
        OTHERS.iter().find(|other| other.endings.contains(&&*ending))
    }

    /// Whether files of this format hold nothing but models.
    pub(crate) fn is_model(&self) -> bool {
        !self.endings.iter().any(|ending| matches!(*ending, "py" | "zip"))
    }
}

/// Says what the file is, and how it becomes an ONNX file.
impl fmt::Display for OtherModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OtherModel { kind, way, .. } = self;
        write!(f, "is {kind}, and Downbeat runs ONNX models; {way} ({})", Pointer::OTHER_MODELS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_of_other_formats_are_named_with_their_way_and_other_files_are_not() {
        let said = OtherModel::of("model.PT").unwrap().to_string();
        assert!(said.starts_with("is a PyTorch model, and Downbeat runs ONNX models; in Python: torch.onnx.export("));
        for name in ["labels.txt", "model", "weights.bin", "net.onnx", ".pt"] {
            assert!(OtherModel::of(name).is_none(), "{name}");
        }
    }

    #[test]
    fn each_ending_belongs_to_one_format() {
        let mut endings: Vec<&str> = OTHERS.iter().flat_map(|other| other.endings).copied().collect();
        let all = endings.len();
        endings.sort_unstable();
        endings.dedup();
        assert_eq!(endings.len(), all);
    }
}
