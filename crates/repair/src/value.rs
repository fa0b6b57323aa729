//! An input or output of a model, with its type.

#![allow(missing_docs, reason = "the names are those of onnx.proto3, which describes them")]

use downbeat_engine::onnx::proto::TensorTypeProto;

/// `TensorProto.DataType` of texts.
const STRING: i32 = 8;

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Value {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, optional, tag = "2")]
    pub r#type: Option<Type>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Type {
    #[prost(message, optional, tag = "1")]
    pub tensor_type: Option<TensorTypeProto>,
    #[prost(message, optional, tag = "4")]
    pub sequence_type: Option<SequenceType>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct SequenceType {
    #[prost(message, optional, tag = "1")]
    pub elem_type: Option<ElementType>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ElementType {
    #[prost(message, optional, tag = "5")]
    pub map_type: Option<MapType>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct MapType {
    #[prost(message, optional, tag = "2")]
    pub value_type: Option<MapValueType>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct MapValueType {
    #[prost(message, optional, tag = "1")]
    pub tensor_type: Option<TensorTypeProto>,
}

impl Value {
    /// Whether the value is a list of maps.
    pub fn is_list(&self) -> bool {
        self.map_value().is_some()
    }

    /// The datatype of the numbers in a list of maps; 0: the file does not say.
    pub fn map_value(&self) -> Option<i32> {
        let sequence = self.r#type.as_ref()?.sequence_type.as_ref()?;
        let map = sequence.elem_type.as_ref()?.map_type.as_ref()?;
        let tensor = map.value_type.as_ref().and_then(|value| value.tensor_type.as_ref());
        Some(tensor.map_or(0, |tensor| tensor.elem_type))
    }

    /// Whether the value is a tensor of texts.
    pub fn has_texts(&self) -> bool {
        self.tensor().is_some_and(|tensor| tensor.elem_type == STRING)
    }

    /// The datatype of a tensor.
    pub fn element(&self) -> Option<i32> {
        self.tensor().map(|tensor| tensor.elem_type)
    }

    /// The sizes of a tensor, none where they vary.
    pub fn dims(&self) -> Option<Vec<Option<i64>>> {
        let shape = self.tensor()?.shape.as_ref()?;
        Some(shape.dim.iter().map(|dim| dim.dim_value.filter(|size| *size >= 0)).collect())
    }

    fn tensor(&self) -> Option<&TensorTypeProto> {
        self.r#type.as_ref()?.tensor_type.as_ref()
    }
}
