//! A folder with a model, whose files hold any bytes.

use std::cell::OnceCell;
use std::path::PathBuf;

use downbeat_core::tensor::{DataType, Signature, TensorSpec};
use downbeat_repository::ModelRepository;
use tempfile::TempDir;

/// A repository with the model `m`, a label file and the data of a warm-up.
pub struct Folder {
    _keep: TempDir,
    repository: ModelRepository,
    /// The file of the model.
    pub model: PathBuf,
}

impl Folder {
    fn new() -> std::io::Result<Self> {
        let keep = tempfile::tempdir()?;
        let model = keep.path().join("m/1/model.onnx");
        std::fs::create_dir_all(keep.path().join("m/1"))?;
        std::fs::create_dir(keep.path().join("m/warmup"))?;
        std::fs::write(&model, b"not read here")?;
        std::fs::write(keep.path().join("m/warmup/x.bin"), [0; 16])?;
        std::fs::write(keep.path().join("m/labels.txt"), "cat\ndog\n")?;
        let repository = ModelRepository::open(keep.path()).map_err(std::io::Error::other)?;
        Ok(Folder { _keep: keep, repository, model })
    }
}

/// Calls `read` with the folder of this thread, if the disk has room for a folder.
pub fn in_folder(read: impl FnOnce(&Folder)) {
    thread_local! {
        static FOLDER: OnceCell<Option<Folder>> = const { OnceCell::new() };
    }
    FOLDER.with(|folder| {
        if let Some(folder) = folder.get_or_init(|| Folder::new().ok()) {
            read(folder);
        }
    });
}

/// The most bytes of warm-ups that this target makes; a configuration may ask for gigabytes.
const MOST_WARM_UP: f64 = 1e5;

/// A `config.pbtxt`, or the JSON of a load request, completed from a model as the server does.
///
/// # Panics
/// If it is refused without a word.
pub fn config_pbtxt(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    in_folder(|folder| match folder.repository.definition("m", Some(text)) {
        Ok(mut definition) => {
            let _ = definition.complete(&signature());
            for warmup in &definition.warmups {
                let elements = |dims: &[usize]| dims.iter().map(|size| *size as f64).product::<f64>();
                let size: f64 = warmup.inputs.values().map(|input| elements(&input.dims)).sum();
                if size * f64::from(warmup.batch_size) < MOST_WARM_UP {
                    let _ = warmup.request("m");
                }
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    });
}

fn signature() -> Signature {
    let spec =
        |name: &str, dims: &[i64]| TensorSpec { name: name.into(), datatype: DataType::Fp32, dims: dims.to_vec() };
    Signature { inputs: vec![spec("x", &[-1, 3])], outputs: vec![spec("y", &[-1, 2]), spec("z", &[-1])] }
}

/// A file of labels, one a line.
///
/// # Panics
/// If it is refused without a word.
pub fn labels(data: &[u8]) {
    const CONFIG: &str = r#"{"name": "m", "platform": "onnxruntime_onnx", "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [2], "label_filename": "labels.txt"}]}"#;
    in_folder(|folder| {
        let labels = folder.model.with_file_name("../labels.txt");
        if std::fs::write(labels, data).is_err() {
            return;
        }
        match folder.repository.definition("m", Some(CONFIG)) {
            Ok(mut definition) => drop(definition.complete(&signature())),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    });
}

/// A model file, read and checked before any engine sees it, and the report on its rows.
///
/// # Panics
/// If it is refused without a word.
pub fn onnx(data: &[u8]) {
    in_folder(|folder| {
        if std::fs::write(&folder.model, data).is_ok()
            && let Err(error) = downbeat_engine::inspect(&folder.model)
                .and_then(|_| downbeat_engine::row_report(&folder.model).map(drop))
        {
            assert!(!error.to_string().is_empty());
        }
    });
}

/// A model file before its repair, and the repaired file.
///
/// # Panics
/// If it is refused without a word, or if a repaired file needs a repair again.
pub fn repair(data: &[u8]) {
    in_folder(|folder| {
        if std::fs::write(&folder.model, data).is_err() {
            return;
        }
        match downbeat_repair::repair(&folder.model) {
            Ok(None) => {}
            Err(error) => assert!(!error.reason.is_empty()),
            Ok(Some(repair)) => {
                let mut repaired = Vec::new();
                if repair.write(&mut repaired).is_ok() && std::fs::write(&folder.model, repaired).is_ok() {
                    let again = downbeat_repair::repair(&folder.model).map(|again| again.map(|again| again.done));
                    assert!(matches!(&again, Ok(None)), "{:?}, then {again:?}", repair.done);
                }
            }
        }
    });
}
