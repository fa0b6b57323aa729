//! Files with the outputs of an answer.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use downbeat_core::tensor::DataType;
use downbeat_protocol::http::{OutputForms, write_response};
use downbeat_protocol::{InferResponse, InferTensor};

use super::npy;
use super::values::{Numbers, Texts};

/// A file for outputs, and its form.
#[derive(Clone, Debug)]
pub struct OutputFile {
    path: PathBuf,
    form: Form,
}

#[derive(Clone, Copy, Debug)]
enum Form {
    Npy,
    Npz,
    Json,
    Csv,
}

/// Reads the name of a file, whose end gives the form.
///
/// # Errors
/// In words, if the end is none that has a form.
pub fn parse_output(text: &str) -> Result<OutputFile, String> {
    let path = PathBuf::from(text);
    let extension = path.extension().map(|extension| extension.to_string_lossy().to_lowercase()).unwrap_or_default();
    let form = match extension.as_str() {
        "npy" => Form::Npy,
        "npz" => Form::Npz,
        "json" => Form::Json,
        "csv" => Form::Csv,
        _ => return Err("expected a name that ends in .npy, .npz, .json or .csv".to_owned()),
    };
    Ok(OutputFile { path, form })
}

impl OutputFile {
    /// Writes the outputs of an answer.
    ///
    /// # Errors
    /// If the form has no place for the outputs, or the file cannot be written.
    pub fn write(&self, response: &InferResponse) -> anyhow::Result<()> {
        let bytes = match (self.form, response.outputs.as_slice()) {
            (Form::Npy, [output]) => npy::write(output),
            (Form::Npy, outputs) => {
                let names: Vec<&str> = outputs.iter().map(|output| output.name.as_str()).collect();
                bail!("a .npy file has one array, but the answer has {}; name a .npz file", names.join(", "))
            }
            (Form::Npz, outputs) => npy::write_archive(outputs)?,
            (Form::Json, _) => json(response)?,
            (Form::Csv, outputs) => csv(outputs, &self.path)?,
        };
        std::fs::write(&self.path, bytes).with_context(|| format!("cannot write {}", self.path.display()))
    }
}

/// The answer as JSON, with a line end.
///
/// # Errors
/// If a text is not UTF-8.
pub fn json(response: &InferResponse) -> anyhow::Result<Vec<u8>> {
    let body = write_response(response, &OutputForms::all(false)).context("--output FILE.npz takes any bytes")?;
    Ok([&body.bytes[..], b"\n"].concat())
}

/// A row for each row of the outputs, with a header. An output of several elements a row has the
/// columns `NAME.0`, `NAME.1` and so on.
fn csv(outputs: &[InferTensor], path: &Path) -> anyhow::Result<Vec<u8>> {
    let rows = outputs.first().and_then(|output| output.shape.first()).copied().unwrap_or(1);
    if let Some(other) = outputs.iter().find(|output| output.shape.first().is_some_and(|first| *first != rows)) {
        bail!(
            "{} would have rows of different outputs: '{}' has the shape {:?}, but others have {rows} rows; name a .npz \
             file",
            path.display(),
            other.name,
            other.shape
        );
    }
    let rows = usize::try_from(rows).unwrap_or(0);
    let columns: Vec<(String, Vec<String>)> =
        outputs.iter().map(|output| (output.name.clone(), cells(output))).collect();
    let mut writer = csv::Writer::from_writer(Vec::new());
    let width = |cells: &[String]| cells.len().checked_div(rows).unwrap_or(0);
    let header = columns.iter().flat_map(|(name, cells)| match width(cells) {
        1 => vec![name.clone()],
        many => (0..many).map(|place| format!("{name}.{place}")).collect(),
    });
    writer.write_record(header)?;
    for row in 0..rows {
        let cells = columns.iter().flat_map(|(_, cells)| {
            let width = width(cells);
            cells.get(row * width..(row + 1) * width).unwrap_or_default()
        });
        writer.write_record(cells)?;
    }
    Ok(writer.into_inner()?)
}

/// The elements as texts that other programs read.
fn cells(output: &InferTensor) -> Vec<String> {
    let numbers = Numbers::of(output.datatype, &output.data);
    match output.datatype {
        DataType::Bytes => Texts(&output.data).map(|text| String::from_utf8_lossy(text).into_owned()).collect(),
        DataType::Fp32 => {
            output.data.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes).to_string()).collect()
        }
        _ => numbers.map(|number| number.to_string()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn tensor(name: &str, datatype: DataType, shape: &[i64], data: &[u8]) -> InferTensor {
        let data = Bytes::copy_from_slice(data);
        InferTensor { name: name.into(), datatype, shape: shape.to_vec(), parameters: Default::default(), data }
    }

    #[test]
    fn a_csv_file_has_a_row_for_each_row() {
        let outputs = [
            tensor("class", DataType::Int64, &[2], &[3, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0]),
            tensor("p", DataType::Uint8, &[2, 2], &[1, 2, 3, 4]),
            tensor("t", DataType::Bytes, &[2, 1], b"\x03\0\0\0a,b\0\0\0\0"),
        ];
        let text = String::from_utf8(csv(&outputs, Path::new("o.csv")).unwrap()).unwrap();
        assert_eq!(text, "class,p.0,p.1,t\n3,1,2,\"a,b\"\n4,3,4,\n");
        let uneven = [outputs[0].clone(), tensor("z", DataType::Uint8, &[1], &[1])];
        assert!(csv(&uneven, Path::new("o.csv")).unwrap_err().to_string().contains("name a .npz file"));
    }

    #[test]
    fn the_name_gives_the_form() {
        let folder = tempfile::tempdir().unwrap();
        let one = tensor("y", DataType::Uint8, &[2], &[1, 2]);
        let two = [one.clone(), InferTensor { name: "z".into(), ..one.clone() }];
        let write = |name: &str, outputs: &[InferTensor]| {
            let path = folder.path().join(name);
            let response = InferResponse { outputs: outputs.to_vec(), ..InferResponse::default() };
            let file = parse_output(path.to_str().unwrap()).unwrap();
            file.write(&response).map(|()| std::fs::read(path).unwrap())
        };
        assert!(write("o.npy", std::slice::from_ref(&one)).unwrap().starts_with(npy::MAGIC));
        assert!(write("o.npz", &two).unwrap().starts_with(npy::ZIP_MAGIC));
        assert!(write("o.json", &two).unwrap().ends_with(b"}\n"));
        assert!(write("o.npy", &two).unwrap_err().to_string().contains("but the answer has y, z"));
        assert!(write("no/such/folder.csv", &two).unwrap_err().to_string().starts_with("cannot write"));
        assert!(parse_output("o.txt").is_err());
    }
}
