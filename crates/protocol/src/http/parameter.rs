//! `parameters` objects in JSON.

use std::borrow::Cow;
use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};

use super::number_word;
use crate::infer::{Parameter, Parameters};

impl<'de> Deserialize<'de> for Parameter {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ParameterVisitor;

        impl<'de> Visitor<'de> for ParameterVisitor {
            type Value = Parameter;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a parameter: true, false, a number or a string")
            }

            fn visit_bool<E>(self, v: bool) -> Result<Parameter, E> {
                Ok(Parameter::Bool(v))
            }

            fn visit_i64<E>(self, v: i64) -> Result<Parameter, E> {
                Ok(Parameter::Int64(v))
            }

            fn visit_u64<E>(self, v: u64) -> Result<Parameter, E> {
                Ok(i64::try_from(v).map_or(Parameter::Uint64(v), Parameter::Int64))
            }

            fn visit_f64<E>(self, v: f64) -> Result<Parameter, E> {
                Ok(Parameter::Double(v))
            }

            fn visit_str<E>(self, v: &str) -> Result<Parameter, E> {
                Ok(Parameter::String(v.to_owned()))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Parameter, A::Error> {
                let value = number_word::read_object(map)?;
                value.map(Parameter::Double).ok_or_else(|| de::Error::invalid_type(de::Unexpected::Map, &self))
            }
        }

        deserializer.deserialize_any(ParameterVisitor)
    }
}

/// The parameters of a tensor. The wire form's parameter is a field of its own, so that the common
/// tensor, which has no others, costs no map.
#[derive(Default)]
pub(super) struct TensorParameters {
    /// The number of bytes after the JSON that belong to this tensor.
    pub binary_data_size: Option<u64>,
    /// The other parameters.
    pub others: Parameters,
}

impl<'de> Deserialize<'de> for TensorParameters {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ObjectVisitor;

        impl<'de> Visitor<'de> for ObjectVisitor {
            type Value = TensorParameters;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a parameters object")
            }

            fn visit_unit<E>(self) -> Result<TensorParameters, E> {
                Ok(TensorParameters::default())
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<TensorParameters, A::Error> {
                let mut parameters = TensorParameters::default();
                while let Some(Key(key)) = map.next_key()? {
                    if key == "binary_data_size" {
                        match map.next_value()? {
                            Parameter::Int64(size) if size >= 0 => {
                                parameters.binary_data_size = Some(size.unsigned_abs());
                            }
                            other => {
                                let other = match other {
                                    Parameter::Double(value) => value.to_string(),
                                    other => serde_json::to_string(&other).unwrap_or_default(),
                                };
                                return Err(de::Error::custom(format_args!(
                                    "binary_data_size is {other}, expected a number of bytes"
                                )));
                            }
                        }
                    } else {
                        parameters.others.insert(key.into_owned(), map.next_value()?);
                    }
                }
                Ok(parameters)
            }
        }

        deserializer.deserialize_any(ObjectVisitor)
    }
}

/// A key, borrowed from the JSON if it has no escapes.
#[derive(serde::Deserialize)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);
