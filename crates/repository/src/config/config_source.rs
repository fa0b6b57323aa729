//! A model configuration as written: protobuf text format or JSON.

use std::io::Read;
use std::path::Path;

use downbeat_core::file_content::{self, FileContentError};
use downbeat_protocol::inference::ModelConfig;
use prost_reflect::{DynamicMessage, EnumDescriptor, Kind, MessageDescriptor};

use crate::boundary::{is_there, reason};
use crate::config::field_index::{At, FieldIndex, split_path};
use crate::config::finding::{ConfigError, Finding, Position, did_you_mean};

/// Largest configuration that is read, bytes. Configurations of real models have a few kilobytes.
pub(crate) const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// The label of findings in the configuration of a load request.
const REQUEST_LABEL: &str = "configuration of the load request";

/// A parsed configuration with the places of its fields.
#[derive(Clone, Debug, Default)]
pub(crate) struct ConfigSource {
    /// The configuration's name in findings.
    pub(crate) label: String,
    /// The parsed message.
    pub(crate) config: ModelConfig,
    origin: Origin,
}

#[derive(Clone, Debug, Default)]
enum Origin {
    /// There is no configuration.
    #[default]
    Absent,
    Text(FieldIndex),
    Json {
        /// Whether the field `max_batch_size` is written.
        max_batch_size: bool,
    },
}

fn schema() -> MessageDescriptor {
    downbeat_protocol::descriptor("inference.ModelConfig")
}

impl ConfigSource {
    /// A missing configuration: the model file completes everything.
    pub(crate) fn absent(label: String) -> Self {
        ConfigSource { label, ..ConfigSource::default() }
    }

    /// Reads `path`; `Ok(None)` if there is no such file.
    pub(crate) fn read(path: &Path, label: String) -> Result<Option<Self>, ConfigError> {
        let fail = |position, message: String| ConfigError::from(Finding { position, ..Finding::of(&label, message) });
        let metadata = match std::fs::metadata(path) {
            Ok(metadata) => metadata,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && !is_there(path) => return Ok(None),
            Err(e) => return Err(fail(None, format!("cannot be read: {}", reason(path, &e)))),
        };
        // Opening a pipe would wait for its writer.
        if !metadata.is_file() {
            return Err(fail(None, "is not a file".to_owned()));
        }
        let mut bytes = Vec::new();
        std::fs::File::open(path)
            .and_then(|file| file.take(MAX_CONFIG_BYTES + 1).read_to_end(&mut bytes))
            .map_err(|e| fail(None, format!("cannot be read: {e}")))?;
        if bytes.len() as u64 > MAX_CONFIG_BYTES {
            let size = metadata.len();
            return Err(fail(
                None,
                format!("has {size} bytes; a model configuration of more than {MAX_CONFIG_BYTES} bytes is not read"),
            ));
        }
        let text = file_content::text(&bytes).map_err(|error| match error {
            FileContentError::NotUtf8 { place: (line, column) } => {
                fail(Some(Position { line, column }), "is not UTF-8 text; save it as UTF-8".to_owned())
            }
            error => fail(None, error.to_string()),
        })?;
        Self::parse_text(text, label).map(Some)
    }

    /// Parses the configuration of a load request: JSON as Triton's clients send it, or the text
    /// format.
    pub(crate) fn from_request(text: &str) -> Result<Self, ConfigError> {
        let label = REQUEST_LABEL.to_owned();
        if text.len() as u64 > MAX_CONFIG_BYTES {
            let message = format!("has {} bytes; at most {MAX_CONFIG_BYTES} are allowed", text.len());
            return Err(Finding::of(label, message).into());
        }
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        if text.trim_start().starts_with('{') { Self::parse_json(text, label) } else { Self::parse_text(text, label) }
    }

    /// Parses the configuration that a model's own code has completed.
    pub(crate) fn from_model(json: &str) -> Result<Self, ConfigError> {
        Self::parse_json(json, "the configuration that auto_complete_config returns".to_owned())
    }

    fn parse_json(text: &str, label: String) -> Result<Self, ConfigError> {
        let fail = |e: serde_json::Error| {
            let position = (e.line() > 0).then(|| Position { line: e.line(), column: e.column() });
            let mut message = e.to_string();
            if let Some(end) = message.rfind(" at line ") {
                message.truncate(end);
            }
            if let Some(unknown) = message.strip_prefix("unrecognized field name '").and_then(|m| m.strip_suffix('\''))
            {
                let names = every_field_name(&schema());
                message =
                    format!("unknown field '{unknown}'{}", did_you_mean(unknown, names.iter().map(String::as_str)));
            }
            ConfigError::from(Finding { position, ..Finding::of(&label, message) })
        };
        let mut json = serde_json::Deserializer::from_str(text);
        let message = DynamicMessage::deserialize(schema(), &mut json).map_err(fail)?;
        json.end().map_err(fail)?;
        // The protobuf JSON form allows both spellings of a name.
        let value: serde_json::Value = serde_json::from_str(text).map_err(fail)?;
        let max_batch_size = ["max_batch_size", "maxBatchSize"].iter().any(|name| value.get(name).is_some());
        let origin = Origin::Json { max_batch_size };
        Ok(ConfigSource { config: transcode(&message, &label)?, label, origin })
    }

    fn parse_text(text: &str, label: String) -> Result<Self, ConfigError> {
        let index = FieldIndex::scan(text)
            .map_err(|e| Finding { position: Some(e.position), ..Finding::of(&label, e.message) })?;
        match DynamicMessage::parse_text_format(schema(), &index.normalised()) {
            Ok(message) => {
                Ok(ConfigSource { config: transcode(&message, &label)?, label, origin: Origin::Text(index) })
            }
            Err(error) => Err(explain(&error, &index, &schema(), label).into()),
        }
    }

    /// Whether `max_batch_size` is written. The message does not tell zero from absent.
    pub(crate) fn says_max_batch_size(&self) -> bool {
        match &self.origin {
            Origin::Absent => false,
            Origin::Text(index) => index.contains("max_batch_size"),
            Origin::Json { max_batch_size } => *max_batch_size,
        }
    }

    /// A finding about a field of this configuration.
    pub(crate) fn finding(&self, field: &str, message: String) -> Finding {
        let position = match &self.origin {
            Origin::Text(index) => index.find(field),
            Origin::Absent | Origin::Json { .. } => None,
        };
        Finding { file: self.label.clone(), position, field: field.to_owned(), message }
    }
}

fn transcode(message: &DynamicMessage, label: &str) -> Result<ModelConfig, ConfigError> {
    message.transcode_to().map_err(|e| Finding::of(label, e.to_string()).into())
}

/// The library's error with its place, the field and a suggestion.
fn explain(
    error: &prost_reflect::text_format::ParseError,
    index: &FieldIndex,
    schema: &MessageDescriptor,
    label: String,
) -> Finding {
    let offset = miette::Diagnostic::labels(error)
        .and_then(|mut labels| labels.next())
        .map(|label| index.original_offset(label.offset()));
    let position = Some(offset.map_or_else(|| index.end(), |offset| index.position(offset)));
    let mut field = String::new();
    let mut message = error.to_string();
    if offset == Some(0) && index.word_at(0).is_empty() {
        message += "; a configuration is in protobuf text format, such as: max_batch_size: 8";
    }
    match offset.and_then(|offset| Some((index.field_at(offset)?, index.word_at(offset)))) {
        Some((At::Name(path), word)) => {
            let parent = path.rsplit_once('.').map_or("", |(parent, _)| parent);
            if let Some(Kind::Message(descriptor)) = resolve(schema, parent)
                && descriptor.get_field_by_name(word).is_none()
            {
                let names: Vec<String> = descriptor.fields().map(|f| f.name().to_owned()).collect();
                field = without_singular_indices(schema, path);
                let hint = did_you_mean(word, names.iter().map(String::as_str));
                message = if hint.is_empty() {
                    format!("{} has no field '{word}'; allowed are: {}", descriptor.name(), names.join(", "))
                } else {
                    format!("{} has no field '{word}'{hint}", descriptor.name())
                };
            }
        }
        Some((At::Value(path), word)) => {
            field = without_singular_indices(schema, path);
            if let Some(Kind::Enum(descriptor)) = resolve(schema, path)
                && !word.is_empty()
            {
                message = explain_enum(&descriptor, word);
            }
        }
        None => {}
    }
    Finding { file: label, position, field, message }
}

fn explain_enum(descriptor: &EnumDescriptor, word: &str) -> String {
    let names: Vec<String> = descriptor.values().map(|v| v.name().to_owned()).filter(|n| n != "TYPE_INVALID").collect();
    // Other frameworks' names of these types are too far from Triton's for a spelling check.
    let bare = word.strip_prefix("TYPE_").unwrap_or(word).to_ascii_uppercase();
    let other_name = (descriptor.name() == "DataType")
        .then(|| match bare.as_str() {
            "FLOAT" | "FLOAT32" => Some("TYPE_FP32"),
            "DOUBLE" | "FLOAT64" => Some("TYPE_FP64"),
            "HALF" | "FLOAT16" => Some("TYPE_FP16"),
            "BFLOAT16" => Some("TYPE_BF16"),
            "BYTES" => Some("TYPE_STRING"),
            "INT" => Some("TYPE_INT32"),
            "LONG" => Some("TYPE_INT64"),
            _ => names.iter().find(|n| n.strip_prefix("TYPE_") == Some(&bare)).map(String::as_str),
        })
        .flatten();
    match other_name {
        Some(name) => format!("{} has no value '{word}'; did you mean '{name}'?", descriptor.name()),
        None => format!(
            "{} has no value '{word}'{}; allowed are: {}",
            descriptor.name(),
            did_you_mean(word, names.iter().map(String::as_str)).trim_end_matches('?'),
            names.join(", ")
        ),
    }
}

/// The kind of the field that a path of the index leads to.
fn resolve(schema: &MessageDescriptor, path: &str) -> Option<Kind> {
    let mut kind = Kind::Message(schema.clone());
    for component in split_path(path) {
        let Kind::Message(descriptor) = kind else { return None };
        let name = component.split_once('[').map_or(component, |(name, _)| name);
        kind = descriptor.get_field_by_name(name)?.kind();
    }
    Some(kind)
}

/// A path of the index without the indices of fields that are not repeated.
fn without_singular_indices(schema: &MessageDescriptor, path: &str) -> String {
    let mut kind = Some(Kind::Message(schema.clone()));
    let mut components = Vec::new();
    for component in split_path(path) {
        let name = component.split_once('[').map_or(component, |(name, _)| name);
        let field = kind.as_ref().and_then(Kind::as_message).and_then(|m| m.get_field_by_name(name));
        let repeated = field.as_ref().is_some_and(|f| f.is_list() || f.is_map());
        components.push(if repeated { component } else { name });
        kind = field.map(|f| f.kind());
    }
    components.join(".")
}

/// Names of all fields anywhere in a message, for suggestions where the place is not known.
fn every_field_name(schema: &MessageDescriptor) -> Vec<String> {
    let mut names = Vec::new();
    let mut seen = vec![schema.clone()];
    let mut next = 0;
    while let Some(message) = seen.get(next).cloned() {
        next += 1;
        for field in message.fields() {
            names.push(field.name().to_owned());
            if let Kind::Message(inner) = field.kind()
                && !seen.contains(&inner)
            {
                seen.push(inner);
            }
        }
    }
    names
}
